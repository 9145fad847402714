"""How many samples may be in flight: the lag bound, as a budget of samples. Pure; waits for nothing.

Called by the actor before it starts a group, and whenever a rollout ends or samples are settled. The number of samples
of a running rollout is not known yet, so it is charged at the most that any rollout has had so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Account:
    """What one unsettled group is charged: rollouts still running, samples of those that ended, ids once published."""

    running: int
    ended_samples: int = 0
    published: set[str] | None = field(default=None)


class SampleBudget:
    """Admits groups so that admitted and unsettled samples stay within `samples_per_step + max_lag`.

    A batch of `samples_per_step` can always be collected: a group that does not fit is still admitted when no other
    group is running and the samples in flight cannot fill a batch. Such a group is the last one of its batch, so with
    `max_lag=0` nothing is left over for the next step and training is on-policy.

    Args:
        samples_per_step: samples that close an optimizer step.
        max_lag: samples that may be in flight beyond those, or None for no bound.
        attempts: rollouts per group.
    """

    def __init__(self, samples_per_step: int, max_lag: int | None, attempts: int) -> None:
        self.samples_per_step = samples_per_step
        self.limit = None if max_lag is None else samples_per_step + max_lag
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

    def can_admit(self) -> bool:
        """Return whether another group may be started now."""
        if self.limit is None:
            return True
        charged = self.charged_samples
        # As long as nothing is known about the number of samples of a rollout, one group at a time finds out.
        is_known = self.samples_per_rollout > 0
        if is_known and charged + self.attempts * self.samples_per_rollout <= self.limit:
            return True
        return self.running_groups == 0 and charged < self.samples_per_step

    def admit(self, group_id: str) -> None:
        """Charge a new group."""
        self._accounts[group_id] = _Account(running=self.attempts)

    def observe_rollout(self, num_samples: int) -> None:
        """Learn from a rollout (also one of an evaluation) how many samples a rollout may have."""
        self.samples_per_rollout = max(self.samples_per_rollout, num_samples)

    def end_rollout(self, group_id: str, num_samples: int) -> None:
        """Replace one running rollout's charge by its samples (0 if it failed)."""
        self.observe_rollout(num_samples)
        account = self._accounts.get(group_id)
        if account is not None and account.running > 0:
            account.running -= 1
            account.ended_samples += num_samples

    def publish(self, group_id: str, sample_ids: Iterable[str]) -> None:
        """Replace the group's charge by its samples, which are on their way to the trainer now."""
        ids = set(sample_ids)
        if ids:
            self._accounts[group_id] = _Account(running=0, published=ids)
        else:
            self._accounts.pop(group_id, None)

    def settle_samples(self, group_id: str, sample_ids: Iterable[str]) -> None:
        """Free samples that were filtered, found stale or failed; the group is settled with its last one."""
        account = self._accounts.get(group_id)
        if account is None or account.published is None:
            return
        account.published.difference_update(sample_ids)
        if not account.published:
            del self._accounts[group_id]

    def settle_group(self, group_id: str) -> None:
        """Free a whole group (trained, or failed without a sample). Unknown groups are ignored."""
        self._accounts.pop(group_id, None)

    def note_trained(self, step: int, num_samples: int) -> None:
        """Hear that a step (of any incarnation) trained so many samples. Only rounds need to know."""

    def stand_at(self, steps_done: int) -> None:
        """Hear behind which step the trainer stands. Only rounds need to know."""

    def _charge(self, account: _Account) -> int:
        if account.published is not None:
            return len(account.published)
        # While nothing is known, a rollout counts as one sample.
        return account.ended_samples + account.running * max(1, self.samples_per_rollout)
