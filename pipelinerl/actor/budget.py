"""The sample budget: samples are charged when a group starts and freed when they are trained, filtered, stale or
failed.

A `LagPolicy` decides how far generation may run ahead of training. A new one is a class here and a line in
`LAG_POLICIES`, or a class of your own: `lag_policy=package.module.MyPolicy`, called with the `RunConfig`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import Rounds, pauses_rollouts, rounds_of
from pipelinerl.domains.user_task import describe_error
from pipelinerl.errors import ConfigError, did_you_mean
from pipelinerl.records import StepDone, StepEnding, TrainerMessage, TrainerStarted, WeightUpdateSuccess
from pipelinerl.rl.user_function import LAG_POLICY_API_VERSION, load_function


@dataclass(slots=True)
class _Account:
    """One unsettled group: running rollouts, samples of finished ones, and sample ids once it is published."""

    running: int
    ended_samples: int = 0
    published: set[str] | None = None


class LagPolicy:
    """No bound (`max_lag=null`), and the base of the other policies."""

    def allows_group(self, budget: SampleBudget) -> bool:
        """Return whether another group may start, given the samples in flight in `budget`.

        Asked again after every start and every event. False for as long as nothing is in flight would end the run.
        """
        return True

    def observe(self, message: TrainerMessage, budget: SampleBudget, is_own: bool = True) -> None:
        """Handle a message of this incarnation's trainer (`is_own`) or an earlier one. Samples of a finished step are
        already settled in `budget`."""

    def retry_s(self) -> float | None:
        """Seconds until `allows_group` may change without an event; None: it cannot."""
        return None

    def batches_ahead(self, most: float) -> float:
        """How many batches generation is expected to be ahead of training where it may be ahead by `most`."""
        return most

    def report(self) -> dict[str, float]:
        """Return the policy's metrics."""
        return {}


class FixedLag(LagPolicy):
    """Unsettled samples stay within `samples_per_step + max_lag`.

    A step can always be filled: a group that does not fit still starts if no other is running and the samples in flight
    are too few for a step. It is then the last group of its step, so with `max_lag=0` nothing is left over and training
    is on-policy.

    Args:
        samples_per_step: samples that close an optimizer step.
        max_lag: samples that may be in flight beyond those.
    """

    def __init__(self, samples_per_step: int, max_lag: int) -> None:
        self._samples_per_step = samples_per_step
        self._max_lag = max_lag

    @classmethod
    def of(cls, config: RunConfig) -> LagPolicy:
        """The policy with the numbers of a run."""
        return LagPolicy() if config.max_lag is None else cls(config.finetune.samples_per_step, config.max_lag)

    def allows_group(self, budget: SampleBudget) -> bool:
        charged = budget.charged_samples
        if budget.group_fits(self._samples_per_step + self._max_lag - charged):
            return True
        return budget.running_groups == 0 and charged < self._samples_per_step


class AdaptiveLag(FixedLag):
    """`max_lag` as an upper bound: generation runs ahead only as far as the trainer needs.

    The budget starts at two batches, the one in training and the next, which gives a lag of 1. A step that waited for
    its batch raises the budget by the share of the step that it waited, up to the bound. Of what was ready beyond the
    next batch in each of the last six steps, a tenth of a batch is kept for steps of uneven length, and half of the
    rest is taken away.

    Servers that are faster than the trainer would be idle when the weights change, and no sequence would get new
    weights midway. So during the last micro-batch of a step, groups start beyond the budget until `in_flight` of a
    batch is running, and again as these end, but never beyond the bound. If they end before the step does, the next
    ones start a fifth closer to its end; if the step ends before they start, a quarter earlier.

    Args:
        in_flight: share of a batch to keep running while the weights change; 0 if updates wait for rollouts.
    """

    IN_FLIGHT = 0.15
    # What one step may start beyond the budget, in multiples of `in_flight`.
    _MOST_REPEATS = 2
    _LOWERED_BY = 0.5
    _LOOKS_BACK = 6
    _SPARE = 0.1
    _SMOOTHING = 0.3
    _LEAST_EARLY = 0.1

    def __init__(
        self,
        samples_per_step: int,
        max_lag: int,
        in_flight: float = IN_FLIGHT,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(samples_per_step, max_lag)
        self._in_flight_samples = in_flight * samples_per_step
        self._clock = clock
        # Samples beyond two batches.
        self._extra = 0.0
        self._surpluses = deque[float]([0.0], self._LOOKS_BACK)
        self._step_began: float | None = None
        # When the last micro-batch of the current step began (trainer's clock, our clock), how long it took in earlier
        # steps, and how long before its end more groups may start.
        self._ending: tuple[float, float] | None = None
        self._ending_s = 0.0
        self._early_s = math.inf

    @classmethod
    def of(cls, config: RunConfig) -> LagPolicy:
        if config.max_lag is None:
            return LagPolicy()
        in_flight = 0.0 if pauses_rollouts(config) else cls.IN_FLIGHT
        return cls(config.finetune.samples_per_step, config.max_lag, in_flight)

    @property
    def budget_samples(self) -> float:
        """How many samples may be unsettled now."""
        return self._samples_per_step + min(self._max_lag, self._samples_per_step + self._extra)

    @property
    def _most_samples(self) -> float:
        """How many samples may be unsettled at the end of a step."""
        late = self.budget_samples + self._MOST_REPEATS * self._in_flight_samples
        return min(late, self._samples_per_step + self._max_lag)

    def allows_group(self, budget: SampleBudget) -> bool:
        charged = budget.charged_samples
        allowed = self.budget_samples
        if self.retry_s() == 0 and budget.running_samples < self._in_flight_samples:
            allowed = self._most_samples
        if budget.group_fits(allowed - charged):
            return True
        return budget.running_groups == 0 and charged < self._samples_per_step

    def observe(self, message: TrainerMessage, budget: SampleBudget, is_own: bool = True) -> None:
        if not is_own:
            return
        match message:
            case StepEnding():
                self._ending = message.time, self._clock()
            case WeightUpdateSuccess():
                self._weights_sent(message, budget)
            case StepDone():
                self._step_done(message, budget)

    def _weights_sent(self, message: WeightUpdateSuccess, budget: SampleBudget) -> None:
        if self._ending is None:
            return
        seconds = message.time - message.seconds.get("total", 0.0) - self._ending[0]
        if self._ending_s - self._early_s >= seconds:
            self._early_s *= 1.25
        elif budget.running_samples < self._in_flight_samples and not budget.group_fits(
            self._most_samples - budget.charged_samples
        ):
            self._early_s *= 0.8
        self._ending_s += self._SMOOTHING * (seconds - self._ending_s) if self._ending_s else seconds
        # One short step must not disable this for many steps.
        self._early_s = min(max(self._early_s, self._LEAST_EARLY * self._ending_s), self._ending_s)
        self._ending = None

    def _step_done(self, message: StepDone, budget: SampleBudget) -> None:
        now, began, batch = self._clock(), self._step_began, self._samples_per_step
        self._ending = None
        was_complete = self._surpluses[-1] >= 0
        self._surpluses.append(budget.charged_samples - budget.running_samples - batch)
        self._step_began = now
        if began is None:
            return
        if not was_complete:
            self._extra += min(message.wait_data_s / (now - began), 1.0) * batch
        else:
            # Waiting for a batch that is ready is stream latency.
            self._extra -= self._LOWERED_BY * max(min(self._surpluses) - self._SPARE * batch, 0.0)
        self._extra = min(max(self._extra, 0.0), max(self._max_lag - batch, 0))

    def retry_s(self) -> float | None:
        """Seconds until groups may start for the next weights; None before the last micro-batch of the step."""
        if self._ending is None:
            return None
        return max(self._ending[1] + self._ending_s - self._early_s - self._clock(), 0.0)

    def batches_ahead(self, most: float) -> float:
        return min(most, 1.0)

    def report(self) -> dict[str, float]:
        return {
            "actor/budget_samples": self.budget_samples,  #: the most samples that may be admitted and without a fate
            #: samples that lay ready beyond a batch when the trainer took one; below 0: as many were missing
            "actor/ready_surplus": self._surpluses[-1],
        }


class OneRound(LagPolicy):
    """`schedule=conventional`: no group starts before the previous round is trained.

    Groups start until the round has its samples and at least one group per step. Filtered and failed groups are
    replaced in the same round. The last group runs alone if it may overfill the round, so nothing is left over. The
    preprocessor closes a round by the same count (`preprocess/batcher.py`).
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._steps_done = 0
        self._trained: dict[int, int] = {}

    def observe(self, message: TrainerMessage, budget: SampleBudget, is_own: bool = True) -> None:
        if isinstance(message, StepDone):
            self._trained[message.step] = message.num_samples
        if is_own and isinstance(message, StepDone | TrainerStarted):
            self._steps_done = message.step

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


#: What makes the policy of a run, by its name in `lag_policy`. tests/unit/actor/test_sample_budget.py runs over all.
LAG_POLICIES: dict[str, Callable[[RunConfig], LagPolicy]] = {"adaptive": AdaptiveLag.of, "fixed": FixedLag.of}


def lag_policy_of(config: RunConfig) -> LagPolicy:
    """The policy of a run.

    Raises:
        ConfigError: there is none of that name, or the user's class cannot be imported or made, or is no `LagPolicy`.
    """
    if (rounds := rounds_of(config)) is not None:
        return OneRound(rounds)
    name = config.lag_policy
    if name in LAG_POLICIES:
        return LAG_POLICIES[name](config)
    if "." not in name:
        expected = f"{', '.join(LAG_POLICIES)}, or the dotted path of a class"
        raise ConfigError("lag_policy", name, expected, did_you_mean(name, LAG_POLICIES))
    make = load_function("lag_policy", name, LAG_POLICY_API_VERSION)
    expected = "a subclass of pipelinerl.actor.budget.LagPolicy that is called with the configuration"
    try:
        policy = make(config)
    except Exception as error:
        raise ConfigError("lag_policy", name, expected, f"It raised {describe_error(error)}.") from error
    if not isinstance(policy, LagPolicy):
        raise ConfigError("lag_policy", name, expected, f"It returned an object of type {type(policy).__name__}.")
    return policy


class SampleBudget:
    """Counts unsettled samples by group; `policy` decides whether another group may start.

    A running rollout is charged the most samples that any rollout has had so far (one until the first has ended).
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

    def group_fits(self, num_samples: float) -> bool:
        """Return whether a group is sure to have at most `num_samples` samples; False until a rollout has ended."""
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
        """Replace a group's charge by the samples that were sent to the trainer."""
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
        """Free a group that was trained, or failed without a sample. Unknown groups are ignored."""
        self._accounts.pop(group_id, None)

    def _charge(self, account: _Account) -> int:
        if account.published is not None:
            return len(account.published)
        return account.ended_samples + account.running * max(1, self.samples_per_rollout)
