"""Do the lists inside a sample belong together? Checked before anything is computed from it. No torch."""

from __future__ import annotations

import math

from pipelinerl.records import IGNORED_LABEL, Sample

# vLLM writes NaN and -inf as -9999.0; no real log-prob comes near.
LOWEST_LOGPROB = -9998.0


def check_sample(sample: Sample) -> list[int]:
    """Positions of the trained tokens; ValueError if the lengths inside a sample disagree (never cut or filled)."""
    trained = [position for position, label in enumerate(sample.labels) if label != IGNORED_LABEL]
    spans = sum(span.end - span.start for span in sample.version_spans)
    faults = []
    if len(sample.labels) != len(sample.input_ids):
        faults.append(f"{len(sample.labels)} labels for {len(sample.input_ids)} input_ids")
    if len(sample.logprobs) != len(trained):
        faults.append(f"{len(sample.logprobs)} logprobs for {len(trained)} trained tokens")
    if sample.ref_logprobs and len(sample.ref_logprobs) != len(trained):
        faults.append(f"{len(sample.ref_logprobs)} ref_logprobs for {len(trained)} trained tokens")
    if spans != len(trained):
        faults.append(f"version_spans cover {spans} of {len(trained)} trained tokens")
    if trained and trained[0] == 0:
        faults.append("the first token is marked as trained but nothing predicts it")
    if faults:
        raise ValueError(f"sample {sample.id}: {'; '.join(faults)}")
    return trained


def find_fault(sample: Sample) -> str | None:
    """Short reason why a sample cannot be trained on whatever the algorithm, or None.

    `bad_lengths`, `bad_logprob`, `bad_ref_logprob` (not finite, positive beyond rounding, or the server's -9999),
    `bad_reward`.
    """
    try:
        check_sample(sample)
    except ValueError:
        return "bad_lengths"
    if not _are_logprobs(sample.logprobs):
        return "bad_logprob"
    if not _are_logprobs(sample.ref_logprobs):
        return "bad_ref_logprob"
    if not math.isfinite(sample.reward):
        return "bad_reward"
    return None


def _are_logprobs(values: list[float]) -> bool:
    """Three passes in C: a NaN or an infinity anywhere makes the sum one too."""
    return not values or (math.isfinite(sum(values)) and min(values) > LOWEST_LOGPROB and max(values) <= 1e-3)
