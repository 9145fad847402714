"""The samples in flight: charged when a group starts, freed when they are trained, filtered, stale or failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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

    def step_trained(self, step: int, num_samples: int) -> None:
        """Note that `step`, of any incarnation, trained `num_samples` samples."""

    def trainer_at(self, steps_done: int) -> None:
        """Note that this incarnation's trainer has finished `steps_done` steps."""


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
