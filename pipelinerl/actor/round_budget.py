"""Admission in rounds of generate-then-train: no group is started before the round before it is trained.

Takes the place of `SampleBudget` with `schedule=conventional`. Pure; waits for nothing. The preprocessor closes a round
by the same count (`preprocess.batcher`): samples in batches plus samples on their way.
"""

from __future__ import annotations

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.config.schedule import Rounds


class RoundBudget(SampleBudget):
    """Admits groups until the round under way has its samples, and at least one group for each of its steps.

    A group that is filtered or fails gives its budget back, and another one of the same round replaces it. The last
    group of a round runs alone if it may overfill the round, so nothing is left over for the next one.
    """

    def __init__(self, rounds: Rounds, attempts: int) -> None:
        super().__init__(rounds.steps * rounds.samples_per_step, max_lag=0, attempts=attempts)
        self._rounds = rounds
        self._steps_done = 0
        self._trained: dict[int, int] = {}

    def note_trained(self, step: int, num_samples: int) -> None:
        self._trained[step] = num_samples

    def stand_at(self, steps_done: int) -> None:
        self._steps_done = steps_done

    def can_admit(self) -> bool:
        rounds, done = self._rounds, self._steps_done
        steps_left = rounds.steps_left(done)
        if not steps_left:
            return False
        trained = sum(self._trained.get(step, 0) for step in range(rounds.start_of(done) + 1, done + 1))
        missing = rounds.target_samples(done) - trained - self.charged_samples
        is_known = self.samples_per_rollout > 0
        if is_known and self.attempts * self.samples_per_rollout <= missing:
            return True
        return self.running_groups == 0 and (missing > 0 or self.unsettled_groups < steps_left)
