"""The command `audit`: the ledger of a run, checked against the files next to the streams."""

from __future__ import annotations

import argparse
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pipelinerl.analysis.ledger import Ledger, build_ledger, read_records
from pipelinerl.commands import typed
from pipelinerl.errors import EXIT_RUN_FAILED, StreamError
from pipelinerl.records import FATES
from pipelinerl.streams.open_run import StartedRun, find_run, open_streams

LOST = ("filtered", "stale", "failed", "unused")


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `audit` prints. `faults` is empty if the run is clean.

    `fates` counts samples, `tokens` output tokens by fate; `goodput` is the trained share of the tokens.
    `pending_in_batches` of the pending samples are in a batch that was not trained (yet). `retrained_samples` were
    trained in steps that a restart rolled back: work that was repeated, not samples that count twice.
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
    """Account for every sample of `run`; a stream that cannot be read is a fault."""
    try:
        with open_streams(run) as streams:
            ledger = build_ledger(read_records(streams))
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
        lengths=compare_lengths(lengths["trained"], lengths["lost"]),
        faults=ledger.faults,
    )


def _check_files(ledger: Ledger, run: StartedRun) -> None:
    """Summary and training states must agree with the streams."""
    steps, batches = ledger.lineage.last_step, max(ledger.batch_of.values(), default=0)
    try:
        summary = msgspec.json.decode(run.run_dir.summary_file.read_bytes(), type=dict[str, Any])
        if summary.get("status") == "completed" and summary.get("steps") != steps:
            ledger.faults.append(f"summary.json says {summary.get('steps')} steps, the streams say {steps}")
    except FileNotFoundError:
        pass
    except msgspec.MsgspecError as error:
        ledger.faults.append(f"summary.json cannot be read: {error}")
    states = run.run_dir.finetune / "training_state"
    for folder in sorted(states.iterdir()) if states.is_dir() else []:
        if folder.name.isdecimal() and int(folder.name) > batches:
            ledger.faults.append(
                f"training state {folder.name} is ahead of the stream training_data, which ends at step {batches}"
            )


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens of some samples; all 0 if there are none."""

    count: int
    mean: float
    p10: int
    p50: int
    p90: int
    max: int


class LengthComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`longer_share` is the probability that a lost sample is longer than a trained one, ties counted half (the
    Mann-Whitney statistic divided by the number of pairs): 0.5 without a bias, None if a side is empty."""

    trained: Lengths
    lost: Lengths
    longer_share: float | None


def length_quantiles(lengths: Sequence[int]) -> Lengths:
    """Mean and quantiles (smallest value with at least that share at or below it)."""
    ordered = sorted(lengths)
    count = len(ordered)
    if not count:
        return Lengths(count=0, mean=0.0, p10=0, p50=0, p90=0, max=0)

    def quantile(percent: int) -> int:
        return ordered[max(0, -(-count * percent // 100) - 1)]

    return Lengths(
        count=count,
        mean=sum(ordered) / count,
        p10=quantile(10),
        p50=quantile(50),
        p90=quantile(90),
        max=ordered[-1],
    )


def compare_lengths(trained: Sequence[int], lost: Sequence[int]) -> LengthComparison:
    """Compare the lengths of trained samples with those of lost ones."""
    share = None
    if trained and lost:
        ordered = sorted(trained)
        halves = sum(bisect_left(ordered, length) + bisect_right(ordered, length) for length in lost)
        share = halves / 2 / (len(trained) * len(lost))
    return LengthComparison(trained=length_quantiles(trained), lost=length_quantiles(lost), longer_share=share)


def render(report: AuditReport) -> str:
    """The report as text, ending with the verdict."""
    return "\n".join(_lines(report))


def _lines(report: AuditReport) -> Iterator[str]:
    fates, rollouts, lengths = report.fates, report.rollouts, report.lengths
    yield f"run {report.run_id}: {report.steps} steps, started {report.starts} time{'s' * (report.starts != 1)}"
    yield ""
    total = " + ".join(f"{fates[fate]} {fate}" for fate in FATES)
    relation = "=" if sum(fates.values()) == report.submitted else "is not"
    yield f"samples: {report.submitted} submitted {relation} {total}"
    yield from (f"  {name}: {n}" for name, n in report.reasons.items() if not name.startswith("trained/"))
    if fates["pending"]:
        waiting = fates["pending"] - report.pending_in_batches
        yield f"  pending: {report.pending_in_batches} in batches that are not trained, {waiting} not in a batch yet"
    if report.retrained_samples:
        yield f"  {report.retrained_samples} samples were trained in steps that a restart rolled back"
    if rollouts:
        yield "rollouts: " + ", ".join(f"{rollouts.get(name, 0)} {name}" for name in ("started", "failed", "unused"))
        yield from (f"  {name}: {n}" for name, n in sorted(rollouts.items()) if "/" in name)
    yield ""
    yield f"output tokens: {report.tokens_generated} generated, goodput {report.goodput:.1%} (trained / generated)"
    yield from (f"  {fate}: {report.tokens[fate]}" for fate in FATES)
    yield f"oldest trained token: {report.max_lag_versions} versions old"
    yield ""
    yield f"lengths of trained samples: {_line(lengths.trained)}"
    yield f"lengths of lost samples:    {_line(lengths.lost)}"
    if lengths.longer_share is not None:
        yield f"a lost sample is longer than a trained one with probability {lengths.longer_share:.3f} (0.5: no bias)"
    yield ""
    if report.is_clean:
        yield "clean: every sample has one fate"
        return
    yield f"NOT CLEAN: {len(report.faults)} fault{'s' * (len(report.faults) != 1)}"
    yield from (f"  {fault}" for fault in report.faults)


def _line(lengths: Lengths) -> str:
    if not lengths.count:
        return "none"
    return (
        f"{lengths.count} samples, mean {lengths.mean:.1f}, p10 {lengths.p10}, p50 {lengths.p50}, p90 {lengths.p90}, "
        f"max {lengths.max} output tokens"
    )


def main(argv: list[str]) -> int:
    """Print the audit of the run that `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=typed("audit"),
        description="Prove from a run's streams that every sample ended in exactly one way: submitted = trained + "
        "filtered + stale + failed + unused + pending. Prints goodput and compares the lengths of trained and lost "
        "samples.",
        epilog="Exit code 0: clean, 1: not clean, 2: not the directory of a run.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)

    report = audit_run(find_run(args.run_dir))
    if args.json:
        print(
            msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(report), "clean": report.is_clean})).decode()
        )
    else:
        print(render(report))
    return 0 if report.is_clean else EXIT_RUN_FAILED
