"""The samples in flight: charged when a group starts, freed when they are trained, filtered, stale or failed.

A `LagPolicy` says how far generation may run ahead of training; `lag_policy_of` chooses it by `schedule` and `max_lag`.
A new policy is a class here and a branch there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import Rounds, rounds_of
from pipelinerl.records import StepDone


@dataclass(slots=True)
class _Account:
    """One unsettled group: rollouts that still run, samples of those that ended, and its sample ids once published."""

    running: int
    ended_samples: int = 0
    published: set[str] | None = None


class LagPolicy:
    """No bound (`max_lag=null`), and the base of the other policies."""

    def allows_group(self, budget: SampleBudget) -> bool:
        """Return whether another group may start, given the samples in flight in `budget`."""
        return True

    def step_trained(self, message: StepDone) -> None:
        """Note that the trainer of any incarnation finished a step."""

    def trainer_at(self, steps_done: int) -> None:
        """Note that this incarnation's trainer has finished `steps_done` steps."""


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

    def step_trained(self, message: StepDone) -> None:
        self._trained[message.step] = message.num_samples

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


class SampleBudget:
    """Counts unsettled samples by group; `policy` decides whether another group may start.

    The number of samples of a running rollout is not known yet, so it is charged as the most that any rollout had so
    far. Until a first rollout has ended it counts as one sample.

    Args:
        policy: bounds the samples in flight.
        attempts: rollouts per group.
    """

    def __init__(self, policy: LagPolicy, attempts: int) -> None:
        self.policy = policy
        self.attempts = attempts
        self.samples_per_rollout = 0
        self._accounts: dict[str, _Account] = {}

    @property
    def charged_samples(self) -> int:
        """Samples charged to all unsettled groups."""
        return sum(self._charge(account) for account in self._accounts.values())

    @property
    def running_samples(self) -> int:
        """Samples charged to groups that are still being generated."""
        return sum(self._charge(account) for account in self._accounts.values() if account.published is None)

    @property
    def running_groups(self) -> int:
        return sum(account.published is None for account in self._accounts.values())

    @property
    def unsettled_groups(self) -> int:
        return len(self._accounts)

    def group_fits(self, num_samples: int) -> bool:
        """Return whether a group is sure to have at most `num_samples` samples; False while no rollout has ended."""
        return 0 < self.attempts * self.samples_per_rollout <= num_samples

    def allows_group(self) -> bool:
        """Return whether another group may start."""
        return self.policy.allows_group(self)

    def start_group(self, group_id: str) -> None:
        """Charge a new group."""
        self._accounts[group_id] = _Account(running=self.attempts)

    def observe_rollout(self, num_samples: int) -> None:
        """Note how many samples a rollout had; rollouts of evaluations count, too."""
        self.samples_per_rollout = max(self.samples_per_rollout, num_samples)

    def end_rollout(self, group_id: str, num_samples: int) -> None:
        """Replace one running rollout's charge by its samples (0 if it failed)."""
        self.observe_rollout(num_samples)
        account = self._accounts.get(group_id)
        if account is not None and account.running > 0:
            account.running -= 1
            account.ended_samples += num_samples

    def publish(self, group_id: str, sample_ids: Iterable[str]) -> None:
        """Replace a group's charge by the samples that are now on their way to the trainer."""
        ids = set(sample_ids)
        if ids:
            self._accounts[group_id] = _Account(running=0, published=ids)
        else:
            self._accounts.pop(group_id, None)

    def settle_samples(self, group_id: str, sample_ids: Iterable[str]) -> None:
        """Free samples that were filtered, stale or failed; the last one settles the group."""
        account = self._accounts.get(group_id)
        if account is None or account.published is None:
            return
        account.published.difference_update(sample_ids)
        if not account.published:
            del self._accounts[group_id]

    def settle_group(self, group_id: str) -> None:
        """Free a whole group that was trained, or failed without a sample. Unknown groups are ignored."""
        self._accounts.pop(group_id, None)

    def _charge(self, account: _Account) -> int:
        if account.published is not None:
            return len(account.published)
        return account.ended_samples + account.running * max(1, self.samples_per_rollout)
