"""Admission that keeps samples fresh, in a simulation of servers and trainer with measured service times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pipelinerl.actor.budget import AdaptiveLag, FixedLag, LagPolicy, SampleBudget
from pipelinerl.actor.progress import Changes
from pipelinerl.records import StepDone, StepEnding, WeightUpdateSuccess

GROUP = 8
BATCH = 512
LARGEST = 2 * BATCH
#: Seconds between tokens of a sequence, by sequences on the server: an engine with a 0.1 B model on one H200.
RUNNING, TOKEN_S = (1, 32, 128, 512), (0.003, 0.004, 0.0072, 0.04)
WARM_UP, STEPS = 8, 22


def sent(version: int, time: float, total: float = 0.0) -> WeightUpdateSuccess:
    return WeightUpdateSuccess(version=version, time=time, seconds={"total": total}, num_servers=1)


@dataclass
class Simulation:
    """Servers generate answers of uneven length in groups, a trainer takes batches of them, in the order of their ends.

    `run` advances all sequences by `tick_s` at a time and fills the other fields: seconds of each step's end, and by
    step the mean lag of its tokens (versions), and the share of its samples with tokens of several versions.
    """

    policy: Callable[[Callable[[], float]], LagPolicy]
    servers: int
    trainer_s: float
    lengths: Callable[[np.random.Generator], float]
    micro_batches: int
    tick_s: float = 0.01
    now: float = 0.0
    ends: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    crossing: list[float] = field(default_factory=list)

    def run(self, steps: int) -> Simulation:
        rng = np.random.default_rng(1)
        budget = SampleBudget(self.policy(lambda: self.now), GROUP)
        is_ending = False
        budget.observe_rollout(1)
        slots = self.servers * 512
        left, tokens, versions = np.zeros(slots), np.zeros(slots), np.zeros(slots)
        first, group_of = np.zeros(slots, int), np.full(slots, -1)
        free, ready, ended = list(range(slots)), list[int](), dict[int, list[tuple[float, float, bool]]]()
        training: list[int] = []
        step_left = waited = 0.0
        groups = step = 0
        while step < steps:
            while len(free) >= GROUP and budget.allows_group():
                budget.start_group(str(groups))
                ended[groups] = []
                for _ in range(GROUP):
                    slot = free.pop()
                    left[slot], group_of[slot], first[slot] = self.lengths(rng), groups, step
                    tokens[slot] = versions[slot] = 0.0
                groups += 1
            running = group_of >= 0
            made = self.tick_s / np.interp(running.sum() / self.servers, RUNNING, TOKEN_S)
            left[running] -= made
            tokens[running] += made
            versions[running] += made * step
            for slot in np.flatnonzero(running & (left <= 0)):
                group = int(group_of[slot])
                group_of[slot] = -1
                free.append(int(slot))
                budget.end_rollout(str(group), 1)
                ended[group].append((tokens[slot], versions[slot], first[slot] != step))
                if len(ended[group]) == GROUP:
                    budget.publish(str(group), [f"{group}/{index}" for index in range(GROUP)])
                    ready.append(group)
            if training:
                step_left -= self.tick_s
                if not is_ending and step_left <= self.trainer_s / self.micro_batches:
                    is_ending = True
                    budget.policy.observe(StepEnding(step=step + 1, time=self.now), budget)
                if step_left <= 0:
                    step += 1
                    self._finish_step(budget, step, training, waited)
                    is_ending = False
                    training, waited = [], 0.0
            if not training and len(ready) * GROUP >= BATCH:
                training, ready = ready[: BATCH // GROUP], ready[BATCH // GROUP :]
                step_left = self.trainer_s
                made_by, by_version, mixed = np.array([row for group in training for row in ended.pop(group)]).T
                self.lags.append(float((step * made_by - by_version).sum() / made_by.sum()))
                self.crossing.append(float(mixed.mean()))
            elif not training:
                waited += self.tick_s
            self.now += self.tick_s
        return self

    def _finish_step(self, budget: SampleBudget, step: int, training: list[int], waited: float) -> None:
        self.ends.append(self.now)
        budget.policy.observe(sent(step, self.now), budget)
        ids = [str(group) for group in training]
        done = StepDone(
            step=step,
            time=self.now,
            group_ids=ids,
            num_samples=BATCH,
            samples_processed=step * BATCH,
            wait_data_s=waited,
        )
        for group in ids:
            budget.settle_group(group)
        budget.policy.observe(done, budget)

    @property
    def step_s(self) -> float:
        return float(np.diff(self.ends[WARM_UP:]).mean())

    def mean(self, values: list[float]) -> float:
        return float(np.mean(values[WARM_UP:]))


def uneven(rng: np.random.Generator) -> float:
    """Chat answers, cut at 512 tokens; 280 on average."""
    return min(512.0, rng.gamma(1.6, 190))


def short(rng: np.random.Generator) -> float:
    return float(rng.integers(6, 17))


def both(servers: int, trainer_s: float, lengths: Callable[[np.random.Generator], float]) -> list[Simulation]:
    """The whole budget from the start, and the adaptive one."""
    tick_s, micro_batches = (0.002, 2) if lengths is short else (0.03, 9)
    policies: list[Callable[[Callable[[], float]], LagPolicy]] = [
        lambda clock: FixedLag(BATCH, LARGEST),
        lambda clock: AdaptiveLag(BATCH, LARGEST, clock=clock),
    ]
    return [Simulation(policy, servers, trainer_s, lengths, micro_batches, tick_s).run(STEPS) for policy in policies]


@pytest.mark.parametrize(
    ("servers", "trainer_s", "lengths"), [(4, 4.6, uneven), (1, 0.6, short)], ids=["uneven", "short"]
)
def test_samples_are_fresh_where_the_trainer_is_the_slower_side(
    servers: int, trainer_s: float, lengths: Callable[[np.random.Generator], float]
) -> None:
    whole, adaptive = both(servers, trainer_s, lengths)
    assert whole.mean(whole.lags) == pytest.approx(2.0, abs=0.01) and whole.mean(whole.crossing) == 0.0
    assert adaptive.mean(adaptive.lags) < 1.2
    assert adaptive.step_s < whole.step_s / 0.98
    assert adaptive.mean(adaptive.crossing) > 0.05


def test_nothing_is_lost_where_the_servers_are_slower() -> None:
    whole, adaptive = both(1, 1.6, uneven)
    assert adaptive.step_s < 1.01 * whole.step_s
    assert adaptive.mean(adaptive.lags) < whole.mean(whole.lags) + 0.05


def test_the_budget_grows_where_long_answers_end_late() -> None:
    """Two batches are not enough here: the last answers of the next one are not ready in time."""
    whole, adaptive = both(4, 2.2, uneven)
    fixed = Simulation(lambda clock: FixedLag(BATCH, BATCH), 4, 2.2, uneven, 9, 0.03).run(STEPS)
    assert fixed.step_s > 1.15 * whole.step_s
    assert adaptive.step_s < 1.05 * whole.step_s


def test_budget_by_hand() -> None:
    """Two batches at first; an incomplete batch that cost a quarter of a step adds a quarter of a batch."""
    now = 0.0
    policy = AdaptiveLag(samples_per_step=8, max_lag=16, clock=lambda: now)
    budget = SampleBudget(policy, attempts=1)
    budget.observe_rollout(1)

    def end_step(at: float, waited: float) -> float:
        nonlocal now
        now = at
        done = StepDone(step=1, time=0.0, group_ids=[], num_samples=8, samples_processed=8, wait_data_s=waited)
        policy.observe(done, budget)
        return policy.budget_samples

    def publish(first: int, last: int) -> None:
        for index in range(first, last):
            budget.start_group(f"g{index}")
            budget.publish(f"g{index}", [f"g{index}/0"])

    assert end_step(0.0, 5.0) == 16, "the first step says nothing about its length"
    assert end_step(4.0, 1.0) == 18
    publish(0, 8)
    assert end_step(8.0, 4.0) == 24, "8 + 16 is the bound"
    assert end_step(12.0, 1.0) == 24, "the batch lay ready: its wait was not for samples"
    publish(8, 12)
    assert [end_step(at, 0.0) for at in (16.0, 20.0, 24.0, 28.0, 32.0)] == [24] * 5
    assert end_step(36.0, 0.0) == pytest.approx(22.4), "six steps with 4 samples beyond a batch of 8: half of 4 - 0.8"
    assert policy.report() == {"actor/budget_samples": pytest.approx(22.4), "actor/ready_surplus": 4.0}
    publish(12, 13)
    assert end_step(40.0, 0.0) == pytest.approx(20.8), "5 now, but 4 in the five before"


def test_sequences_start_for_the_update() -> None:
    """Groups of 2, of which one is an eighth of a batch, beyond the budget when the step is about to end."""
    now = 0.0
    policy = AdaptiveLag(samples_per_step=16, max_lag=32, in_flight=0.125, clock=lambda: now)
    budget = SampleBudget(policy, attempts=2)
    budget.observe_rollout(1)
    started = ended = settled = 0

    def admit() -> int:
        nonlocal started
        before = started
        while budget.allows_group():
            budget.start_group(str(started))
            started += 1
        return started - before

    def end(number: int) -> None:
        nonlocal ended
        for _ in range(number):
            budget.publish(str(ended), [f"{ended}/0", f"{ended}/1"])
            ended += 1

    def begin_ending() -> None:
        # The trainer's clock is 100 s ahead.
        policy.observe(StepEnding(step=1, time=now + 100.0), budget)

    def end_step(at: float) -> None:
        """The last micro-batch ends at `at`, and the update takes a second."""
        nonlocal now, settled
        now = at + 1.0
        policy.observe(sent(1, at + 101.0, total=1.0), budget)
        assert policy.retry_s() is None
        for number in range(settled, settled + 8):
            budget.settle_group(str(number))
        settled += 8
        policy.observe(StepDone(step=1, time=0.0, group_ids=[], num_samples=16, samples_processed=16), budget)

    assert admit() == 16
    end(15)
    assert policy.retry_s() is None
    begin_ending()
    assert policy.retry_s() == 0 and admit() == 0, "a group runs already"
    for more in (1, 1, 0):
        end(1)
        assert admit() == more, "kept busy, one group at a time, with two in all"
    end_step(4.0)

    # The last micro-batch took 4 s.
    assert admit() == 6, "two batches again"
    begin_ending()
    assert policy.retry_s() == 0
    for ending, more in ((6, 1), (1, 1), (1, 0)):
        end(ending)
        assert admit() == more
    end_step(9.0)
    begin_ending()
    assert policy.retry_s() == pytest.approx(4.0 - 0.8 * 4.0), "all had ended too early, so a fifth later"
    now = 10.7
    assert policy.retry_s() == pytest.approx(0.1)
    assert admit() == 6
    end(6)
    now = 11.0
    assert admit() == 1
    end_step(14.0)
    begin_ending()
    assert policy.retry_s() == pytest.approx(0.8), "one was running, so as before"
    end_step(15.5)
    begin_ending()
    # 4 + 0.3 * (0.5 - 4) s is what it is expected to take now.
    assert policy.retry_s() == 0.0, "the step ended before: a quarter earlier, but not before its last micro-batch"


def test_one_short_ending_does_not_stop_what_starts_for_the_next_ones() -> None:
    """Both messages of a step may be read together."""
    now = 0.0
    policy = AdaptiveLag(samples_per_step=16, max_lag=32, clock=lambda: now)
    budget = SampleBudget(policy, attempts=2)
    budget.observe_rollout(1)
    waits = []
    for seconds in (1e-4, *[4.0] * 40):
        policy.observe(StepEnding(step=1, time=now), budget)
        waits.append(policy.retry_s())
        now += seconds
        policy.observe(sent(1, now), budget)
    assert waits[-1] == pytest.approx(4.0 - 0.4, abs=1e-3), "at least a tenth of it before its end"


def test_a_bound_below_one_batch_stays_the_bound() -> None:
    policy = AdaptiveLag(samples_per_step=8, max_lag=3)
    assert policy.budget_samples == 11
    on_policy = SampleBudget(AdaptiveLag(samples_per_step=8, max_lag=0), attempts=2)
    on_policy.observe_rollout(1)
    count = 0
    while on_policy.allows_group():
        on_policy.start_group(f"g{count}")
        count += 1
    assert count == 4


async def test_a_wait_looks_again_after_the_time_that_it_was_told() -> None:
    """Also if what it waits for comes true between the check and the question how long."""
    looks = 0

    def predicate() -> bool:
        nonlocal looks
        looks += 1
        return looks == 2

    left = iter([0.01])
    async with asyncio.timeout(5):
        await Changes().wait_for(predicate, lambda: next(left, None))
    assert looks == 2
