"""The lag bound in samples: policies, charges, settling (D8, L6)."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest

from pipelinerl.actor.budget import LAG_POLICIES, FixedLag, LagPolicy, OneRound, SampleBudget, lag_policy_of
from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records import StepDone


def known(samples_per_step: int, max_lag: int, attempts: int, per_rollout: int = 1) -> SampleBudget:
    budget = SampleBudget(FixedLag(samples_per_step, max_lag), attempts)
    budget.observe_rollout(per_rollout)
    return budget


def admit_all(budget: SampleBudget, first: int = 0) -> int:
    count = 0
    while budget.allows_group():
        budget.start_group(f"g{first + count}")
        count += 1
    return count


def publish(budget: SampleBudget, group_id: str, samples: int) -> None:
    budget.publish(group_id, [f"{group_id}/s{index}" for index in range(samples)])


def test_on_policy_admits_one_batch_and_waits_for_the_step() -> None:
    budget = known(samples_per_step=8, max_lag=0, attempts=2)
    assert admit_all(budget) == 4
    for index in range(4):
        publish(budget, f"g{index}", 2)
    assert budget.charged_samples == 8 and not budget.allows_group()
    for index in range(3):
        budget.settle_group(f"g{index}")
    assert budget.charged_samples == 2
    assert admit_all(budget, first=4) == 3


def test_max_lag_is_what_may_be_in_flight_beyond_the_batch() -> None:
    assert admit_all(known(samples_per_step=8, max_lag=6, attempts=2)) == 7
    # 15 samples: the eighth group would make 16.
    assert admit_all(known(samples_per_step=8, max_lag=7, attempts=2)) == 7


def test_without_a_bound_everything_is_admitted() -> None:
    budget = SampleBudget(LagPolicy(), attempts=2)
    for index in range(100):
        assert budget.allows_group()
        budget.start_group(f"g{index}")


def test_running_rollouts_are_charged_at_the_most_seen_and_then_at_what_they_had() -> None:
    budget = known(samples_per_step=16, max_lag=0, attempts=2, per_rollout=4)
    assert admit_all(budget) == 2
    assert budget.charged_samples == 16
    budget.end_rollout("g0", 1)
    assert budget.charged_samples == 1 + 4 + 8
    budget.end_rollout("g0", 0)
    publish(budget, "g0", 1)
    # 1 + 8 charged, another group of at most 8 would make 17.
    assert budget.charged_samples == 9 and not budget.allows_group()
    budget.end_rollout("g1", 2)
    # 1 + 2 + 4, and 8 more make 15.
    assert budget.allows_group()


def test_a_group_that_does_not_fit_is_admitted_alone_when_the_batch_cannot_fill() -> None:
    budget = known(samples_per_step=4, max_lag=0, attempts=2, per_rollout=3)
    assert admit_all(budget) == 1
    publish(budget, "g0", 3)
    assert budget.allows_group()
    budget.start_group("g1")
    assert not budget.allows_group()
    publish(budget, "g1", 6)
    assert not budget.allows_group()


def test_nothing_is_known_at_first_so_one_group_finds_out() -> None:
    budget = SampleBudget(FixedLag(8, 100), attempts=2)
    assert admit_all(budget) == 1
    budget.end_rollout("g0", 5)
    assert budget.samples_per_rollout == 5
    assert admit_all(budget, first=1) == (108 - 10) // 10


def test_leftovers_of_an_earlier_start_do_not_starve_the_first_batch() -> None:
    budget = SampleBudget(FixedLag(8, 0), attempts=2)
    publish(budget, "old", 3)
    assert admit_all(budget) == 1
    assert SampleBudget(FixedLag(2, 0), attempts=2).allows_group()
    publish(full := SampleBudget(FixedLag(2, 0), attempts=2), "old", 3)
    assert not full.allows_group()


def test_filtered_and_failed_samples_give_their_budget_back() -> None:
    budget = known(samples_per_step=4, max_lag=0, attempts=4)
    assert admit_all(budget) == 1
    publish(budget, "g0", 4)
    budget.settle_samples("g0", ["g0/s0", "g0/s1"])
    budget.settle_samples("g0", ["g0/s1", "other"])
    assert budget.charged_samples == 2
    budget.settle_samples("g0", ["g0/s2", "g0/s3"])
    assert budget.charged_samples == 0 and budget.allows_group()
    budget.start_group("g1")
    publish(budget, "g1", 0)
    assert budget.charged_samples == 0
    budget.settle_group("unknown")
    budget.settle_samples("unknown", ["x"])


def config_of(lag_policy: str, samples_per_step: int = 8, max_lag: int | None = 4) -> RunConfig:
    finetune = {"train_batch_size": samples_per_step, "gradient_accumulation_passes": 1}
    values = {"output_dir": "x", "lag_policy": lag_policy, "max_lag": max_lag, "finetune": finetune}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("name", LAG_POLICIES)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("samples_per_step", "max_lag"), [(8, 0), (8, 5), (16, 40), (1, 0)])
def test_l6_random_runs_neither_starve_nor_overrun(name: str, seed: int, samples_per_step: int, max_lag: int) -> None:
    """Rollouts of 0 to 4 samples, ending in any order: every batch fills, and with max_lag=0 nothing is left over."""
    rng = random.Random(seed)
    attempts = rng.choice([1, 2, 3])
    budget = SampleBudget(lag_policy_of(config_of(name, samples_per_step, max_lag)), attempts)
    budget.observe_rollout(4)
    running: list[str] = []
    published: list[tuple[str, int]] = []
    number = steps = 0
    while steps < 30:
        while budget.allows_group():
            budget.start_group(f"g{number}")
            running.append(f"g{number}")
            number += 1
        batch, total = 0, 0
        while batch < len(published) and total < samples_per_step:
            total += published[batch][1]
            batch += 1
        if total >= samples_per_step:
            if max_lag == 0:
                assert not running and batch == len(published)
            for group_id, _ in published[:batch]:
                budget.settle_group(group_id)
            published = published[batch:]
            steps += 1
            done = StepDone(step=steps, time=0.0, group_ids=[], num_samples=total, samples_processed=0)
            budget.policy.observe(done, budget)
            continue
        assert running, "starved: nothing runs and no batch can be filled"
        group_id = running.pop(rng.randrange(len(running)))
        samples = [rng.randrange(5) for _ in range(attempts)]
        for count in samples:
            budget.end_rollout(group_id, count)
        publish(budget, group_id, sum(samples))
        if sum(samples):
            published.append((group_id, sum(samples)))
        largest = samples_per_step + max_lag + attempts * 4 - 1
        assert budget.charged_samples <= largest


@pytest.mark.parametrize("name", LAG_POLICIES)
@pytest.mark.parametrize("batches", [0, 1, 2, 5])
def test_a_policy_runs_as_far_ahead_as_it_says(name: str, batches: int) -> None:
    """Until the first step ends, which tells an adaptive one more."""
    budget = SampleBudget(lag_policy_of(config_of(name, samples_per_step=60, max_lag=60 * batches)), attempts=1)
    budget.observe_rollout(1)
    assert admit_all(budget) == pytest.approx(60 * (1 + budget.policy.batches_ahead(batches)), abs=1)


@pytest.mark.parametrize("name", LAG_POLICIES)
def test_without_max_lag_no_policy_bounds_anything(name: str) -> None:
    assert type(lag_policy_of(config_of(name, max_lag=None))) is LagPolicy


def test_a_policy_of_the_user_is_made_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(LagPolicy):
        def __init__(self, config: RunConfig) -> None:
            self.most = 2 * config.finetune.samples_per_step

        def allows_group(self, budget: SampleBudget) -> bool:
            return budget.charged_samples < self.most

    monkeypatch.setitem(sys.modules, "their_package", SimpleNamespace(Twice=Twice))
    for max_lag in (0, None):
        budget = SampleBudget(lag_policy_of(config_of("their_package.Twice", max_lag=max_lag)), attempts=1)
        assert admit_all(budget) == 16


def test_unknown_policies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def outdated(config: RunConfig) -> LagPolicy:
        return LagPolicy()

    def broken(config: RunConfig) -> LagPolicy:
        raise KeyError("threshold")

    outdated.api_version = 0  # type: ignore[attr-defined]
    theirs = SimpleNamespace(outdated=outdated, broken=broken, number=3, no_policy=lambda config: 3)
    monkeypatch.setitem(sys.modules, "their_package", theirs)
    for name, near in (("adaptiv", "adaptive"), ("fixd", "fixed")):
        with pytest.raises(ConfigError) as caught:
            lag_policy_of(config_of(name))
        assert (caught.value.key, caught.value.got) == ("lag_policy", name)
        assert near in caught.value.next_step
    names = ("missing", "outdated", "broken", "number", "no_policy")
    for name in ("", "none-like-it", "no_such_package.Policy", *(f"their_package.{name}" for name in names)):
        with pytest.raises(ConfigError) as caught:
            lag_policy_of(config_of(name))
        assert (caught.value.key, caught.value.got) == ("lag_policy", name)


def test_rounds_have_a_policy_of_their_own() -> None:
    assert isinstance(lag_policy_of(RunConfig(output_dir="x", schedule="conventional")), OneRound)  # type: ignore[call-arg]
