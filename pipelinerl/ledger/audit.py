"""The audit of one run: evidence, fold, checks against the files beside the streams, and the figures to show.

Called by the command `audit`. Waits for nothing but the streams.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.ledger.evidence import read_evidence
from pipelinerl.ledger.fold import Ledger, fold
from pipelinerl.ledger.lengths import LengthComparison, compare
from pipelinerl.run.open_run import StartedRun, open_streams

LOST = ("filtered", "stale", "failed")


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `audit` prints. `faults` is empty if the run is clean.

    `fates` are samples; `tokens` are output tokens by fate, `goodput` is the share of them that was trained.
    `pending_in_batches` of the pending samples are in a batch that was not trained (yet). `retrained_samples` were
    trained in steps that a restart rolled back (work done twice, not samples trained twice).
    """

    run_id: str
    starts: int
    steps: int
    submitted: int
    fates: dict[str, int]
    reasons: dict[str, int]
    pending_in_batches: int
    retrained_samples: int
    rollouts: dict[str, int]
    tokens: dict[str, int]
    tokens_generated: int
    goodput: float
    max_lag_versions: int
    lengths: LengthComparison
    faults: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.faults


def audit_run(run: StartedRun) -> AuditReport:
    """Account for every sample of `run`; a stream that cannot be read is a fault of its own."""
    try:
        with open_streams(run) as streams:
            ledger = fold(read_evidence(streams))
            _check_files(ledger, run)
    except StreamError as error:
        ledger = Ledger(faults=[str(error)])
    return _report(ledger, run)


def _report(ledger: Ledger, run: StartedRun) -> AuditReport:
    tokens = ledger.tokens()
    generated = sum(tokens.values())
    lengths: dict[str, list[int]] = {"trained": [], "lost": []}
    for name, sample in ledger.samples.items():
        fate = ledger.fates.get(name)
        if fate is not None:
            lengths["lost" if fate in LOST else "trained"].append(sample.output_tokens)
    return AuditReport(
        run_id=run.identity.run_id,
        starts=run.identity.incarnation + 1,
        steps=ledger.lineage.last_step,
        submitted=ledger.submitted,
        fates={str(fate): count for fate, count in ledger.counts().items()},
        reasons={f"{fate}/{reason}": count for (fate, reason), count in sorted(ledger.reasons.items())},
        pending_in_batches=sum(1 for name in ledger.batch_of if name in ledger.samples and name not in ledger.fates),
        retrained_samples=ledger.rolled_back_samples,
        rollouts=dict(ledger.rollouts),
        tokens={str(fate): count for fate, count in tokens.items()},
        tokens_generated=generated,
        goodput=tokens["trained"] / generated if generated else 0.0,
        max_lag_versions=ledger.max_lag_versions(),
        lengths=compare(lengths["trained"], lengths["lost"]),
        faults=ledger.faults,
    )


def _check_files(ledger: Ledger, run: StartedRun) -> None:
    """Summary and training states must tell the same story as the streams."""
    steps, batches = ledger.lineage.last_step, max(ledger.batch_of.values(), default=0)
    summary = _read_json(ledger, run, "summary.json")
    if summary.get("status") == "completed" and summary.get("steps") != steps:
        ledger.faults.append(f"summary.json says {summary.get('steps')} steps, the streams say {steps}")
    states = run.run_dir.finetune / "training_state"
    for folder in sorted(states.iterdir()) if states.is_dir() else []:
        if folder.name.isdecimal() and int(folder.name) > batches:
            ledger.faults.append(
                f"training state {folder.name} is ahead of the stream training_data, which ends at step {batches}"
            )


def _read_json(ledger: Ledger, run: StartedRun, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = msgspec.json.decode((run.run_dir.root / name).read_bytes(), type=dict[str, Any])
        return content
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        ledger.faults.append(f"{name} cannot be read: {error}")
        return {}
