"""Notices that nothing is being learned: steps in a row, or samples for whole steps, in which every advantage is 0.

Called by the collector with the records of the trainer and the preprocessor. Pure: waits for nothing.
"""

from __future__ import annotations

from pipelinerl.records import FateRecord, MetricRecord

#: So many steps in a row are said once; after that, every so many again.
FIRST_AFTER_STEPS = 5
AGAIN_AFTER_STEPS = 50
ZERO_ADVANTAGE = "finetune/zero_advantage_fraction"
_WHAT_TO_DO = (
    "Print some answers and their rewards in your rollout function (it writes to {log}); then mend the reward "
    "(`python -m pipelinerl check-domain` tries it), or choose easier or harder problems, or more attempts."
)


class LearningWatch:
    """Counts what was of no use since the last step from which something could be learned.

    Args:
        samples_per_step: of the configuration.
        log: file that holds what rollout functions print.
    """

    def __init__(self, samples_per_step: int, log: str) -> None:
        self._samples_per_step = samples_per_step
        self._advice = _WHAT_TO_DO.format(log=log)
        self._steps = 0
        self._filtered = 0

    def step(self, record: MetricRecord) -> str | None:
        """Take the numbers of one step; returns what to tell the user, if it is time."""
        fraction = record.values.get(ZERO_ADVANTAGE)
        if fraction is None:
            return None
        self._filtered = 0
        self._steps = self._steps + 1 if fraction >= 1 else 0
        if not _is_due(self._steps):
            return None
        reward = record.values.get("finetune/reward_mean", 0.0)
        return (
            f"note: nothing was learned in {self._steps} steps in a row, up to step {record.step}: the attempts of "
            f"each group got the same reward (mean {reward:.3f}), so every advantage is 0. {self._advice}"
        )

    def fate(self, record: FateRecord) -> str | None:
        """Take the end of some samples; with `filter_zero_advantage_groups` no step comes if all groups are such."""
        if record.fate != "filtered" or record.reason != "zero_advantage":
            return None
        before = self._filtered // self._samples_per_step
        self._filtered += len(record.sample_ids)
        steps = self._filtered // self._samples_per_step
        if steps == before or not _is_due(steps):
            return None
        return (
            f"note: {self._filtered} samples since the last step, enough for {steps} steps, were left out by "
            "finetune.rl.filter_zero_advantage_groups: the attempts of each of their groups got the same reward. "
            f"{self._advice}"
        )


def _is_due(steps: int) -> bool:
    return steps >= FIRST_AFTER_STEPS and (steps - FIRST_AFTER_STEPS) % AGAIN_AFTER_STEPS == 0
