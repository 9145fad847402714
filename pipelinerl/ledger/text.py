"""An audit as text for the terminal. Pure; called by the command `audit`."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.ledger.audit import AuditReport
from pipelinerl.ledger.lengths import Lengths

_FATES = ("trained", "filtered", "stale", "failed", "pending")


def render(report: AuditReport) -> str:
    """The whole report, ending with the verdict."""
    return "\n".join([*_balance(report), *_goodput(report), *_lengths(report), *_verdict(report)])


def _balance(report: AuditReport) -> Iterator[str]:
    fates = report.fates
    yield f"run {report.run_id}: {report.steps} steps, started {report.starts} time{'s' * (report.starts != 1)}"
    yield ""
    total = " + ".join(f"{fates[fate]} {fate}" for fate in _FATES)
    relation = "=" if sum(fates.values()) == report.submitted else "is not"
    yield f"samples: {report.submitted} submitted {relation} {total}"
    for reason, count in report.reasons.items():
        if not reason.startswith("trained/"):
            yield f"  {reason}: {count}"
    if fates["pending"]:
        waiting = fates["pending"] - report.pending_in_batches
        yield f"  pending: {report.pending_in_batches} in batches that are not trained, {waiting} on their way to one"
    if report.retrained_samples:
        yield f"  {report.retrained_samples} samples were trained in steps that a restart rolled back"
    rollouts = report.rollouts
    if rollouts:
        yield f"rollouts: {rollouts.get('started', 0)} started, {rollouts.get('failed', 0)} without a published sample"
        for name, count in sorted(rollouts.items()):
            if name.startswith("failed/"):
                yield f"  {name}: {count}"


def _goodput(report: AuditReport) -> Iterator[str]:
    yield ""
    yield f"output tokens: {report.tokens_generated} generated, goodput {report.goodput:.1%} (trained / generated)"
    for fate in _FATES:
        yield f"  {fate}: {report.tokens[fate]}"
    yield f"oldest trained token: {report.max_lag_versions} versions behind"


def _lengths(report: AuditReport) -> Iterator[str]:
    lengths = report.lengths
    yield ""
    yield f"lengths of trained samples: {_line(lengths.trained)}"
    yield f"lengths of lost samples:    {_line(lengths.lost)}"
    if lengths.longer_share is not None:
        yield f"a lost sample is longer than a trained one with probability {lengths.longer_share:.3f} (0.5: no bias)"


def _line(lengths: Lengths) -> str:
    if not lengths.count:
        return "none"
    return (
        f"{lengths.count} samples, mean {lengths.mean:.1f}, p10 {lengths.p10}, p50 {lengths.p50}, p90 {lengths.p90}, "
        f"max {lengths.max} output tokens"
    )


def _verdict(report: AuditReport) -> Iterator[str]:
    yield ""
    if report.is_clean:
        yield "clean: every sample has one fate"
        return
    yield f"NOT CLEAN: {len(report.faults)} fault{'s' * (len(report.faults) != 1)}"
    for fault in report.faults:
        yield f"  {fault}"
