"""How far generation may run ahead of training: the lag policies.

`lag_policy_of` chooses one by `schedule` and `max_lag`. A new policy is a class here and a branch there.
"""

from __future__ import annotations

from pipelinerl.actor.budget import LagPolicy, SampleBudget
from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import Rounds, rounds_of


class MaxLag(LagPolicy):
    """Unsettled samples stay within `samples_per_step + max_lag`.

    A step can always be filled: a group that does not fit still starts if no other group runs and the samples in
    flight are too few for a step. It is then the last group of its step, so with `max_lag=0` nothing is left over for
    the next step and training is on-policy.

    Args:
        samples_per_step: samples that close an optimizer step.
        max_lag: samples that may be in flight beyond those.
    """

    def __init__(self, samples_per_step: int, max_lag: int) -> None:
        self._samples_per_step = samples_per_step
        self._max_lag = max_lag

    def allows_group(self, budget: SampleBudget) -> bool:
        charged = budget.charged_samples
        if budget.group_fits(self._samples_per_step + self._max_lag - charged):
            return True
        return budget.running_groups == 0 and charged < self._samples_per_step


class OneRound(LagPolicy):
    """`schedule=conventional`: no group starts before the previous round is trained.

    Groups start until the round has its samples, and at least one group for each of its steps. A group that is
    filtered or fails is replaced in the same round. The last group of a round runs alone if it may overfill the round,
    so nothing is left over for the next one. The preprocessor closes a round by the same count (`preprocess.batcher`).
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._steps_done = 0
        self._trained: dict[int, int] = {}

    def step_trained(self, step: int, num_samples: int) -> None:
        self._trained[step] = num_samples

    def trainer_at(self, steps_done: int) -> None:
        self._steps_done = steps_done

    def allows_group(self, budget: SampleBudget) -> bool:
        rounds, done = self._rounds, self._steps_done
        steps_left = rounds.steps_left(done)
        if not steps_left:
            return False
        trained = sum(self._trained.get(step, 0) for step in range(rounds.start_of(done) + 1, done + 1))
        missing = rounds.target_samples(done) - trained - budget.charged_samples
        if budget.group_fits(missing):
            return True
        return budget.running_groups == 0 and (missing > 0 or budget.unsettled_groups < steps_left)


def lag_policy_of(config: RunConfig) -> LagPolicy:
    """The policy of a run."""
    if (rounds := rounds_of(config)) is not None:
        return OneRound(rounds)
    if config.max_lag is not None:
        return MaxLag(config.finetune.samples_per_step, config.max_lag)
    return LagPolicy()
