"""Findings: each planted fault is found within 20 steps and no other is; healthy runs have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.short_sample import evaluation_result, fate_record

from pipelinerl.records import FateRecord, MetricRecord
from pipelinerl.tracking.health import (
    AGAIN_AFTER_STEPS,
    FILTERED_STEPS,
    RULES,
    WAITING_STEPS,
    EqualRewards,
    Finding,
    Health,
    Waits,
    add_finding,
    newest_findings,
)
from pipelinerl.tracking.state import RunState

RECORDED = Path(__file__).parent / "recorded"
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
#: The step after which a fault begins, and the last one.
PLANTED, LAST = 40, 60

Curve = Callable[[int], float]
HEALTHY: dict[str, Curve] = {
    "finetune/loss": lambda step: 0.0,
    "finetune/samples": lambda step: 512.0,
    "finetune/ess": lambda step: 0.95,
    "finetune/compiled_layers": lambda step: 1.0,
    "finetune/kl_sampler_trainer": lambda step: 1e-3,
    "finetune/zero_advantage_fraction": lambda step: 0.3,
    "rl/entropy_estimate": lambda step: 0.8 - 0.005 * step,
    "rl/ratio_mean": lambda step: 1.0 + 0.002 * (-1) ** step,
    "rl/lag_share_8_plus": lambda step: 0.0,
    "actor/output_tokens_per_rollout": lambda step: 200.0 + 2 * step,
    "actor/failed_rollouts": lambda step: step // 4,
    "actor/failed_bad_reward": lambda step: step // 4,
    "actor/sums/no_answer": lambda step: 0.1,
    "actor/sums/no_error": lambda step: 0.99,
    "preprocessor/reward_mean": lambda step: 0.2 + 0.005 * step,
    "preprocessor/success_rate": lambda step: 0.2 + 0.005 * step,
    "preprocessor/cut_fraction": lambda step: 0.05,
    "preprocessor/repeated_4grams": lambda step: 0.1,
    "preprocessor/stale_samples": lambda step: float(step),
}
FLAT = {"preprocessor/success_rate": lambda step: 0.2, "preprocessor/reward_mean": lambda step: 0.2}


def after(value: float, name: str) -> Curve:
    """The healthy curve of `name`, and `value` once the fault begins."""
    return lambda step: value if step > PLANTED else HEALTHY[name](step)


def changed(**values: float) -> dict[str, Curve]:
    return {name: after(value, name) for name, value in values.items()}


FAULTS: dict[str, tuple[str, dict[str, Curve]]] = {
    "entropy collapses": ("entropy_collapse", changed(**{"rl/entropy_estimate": 0.01})),
    "entropy explodes": ("entropy_explosion", changed(**{"rl/entropy_estimate": 3.0})),
    "samples that do not count": ("policy_drift", changed(**{"finetune/ess": 0.2})),
    "ratios away from 1": ("policy_drift", changed(**{"rl/ratio_mean": 1.5})),
    "policies apart": ("policy_drift", changed(**{"finetune/kl_sampler_trainer": 0.5})),
    "longer for nothing": ("length_blow_up", FLAT | changed(**{"actor/output_tokens_per_rollout": 900.0})),
    "cut answers": ("truncation", changed(**{"preprocessor/cut_fraction": 0.6})),
    "too easy": (
        "reward_saturation",
        changed(**{"finetune/zero_advantage_fraction": 0.95, "preprocessor/success_rate": 0.98}),
    ),
    "too hard": (
        "reward_saturation",
        FLAT | changed(**{"finetune/zero_advantage_fraction": 0.95, "preprocessor/success_rate": 0.02}),
    ),
    "a part of the reward": (
        "reward_without_success",
        changed(**{"preprocessor/reward_mean": 0.9, "preprocessor/success_rate": 0.1}),
    ),
    "says it again": ("repetition", changed(**{"preprocessor/repeated_4grams": 0.8})),
    "no answer to be read": ("format_lost", changed(**{"actor/sums/no_answer": 0.7})),
    "old tokens": ("stale_samples", changed(**{"rl/lag_share_8_plus": 0.5})),
    "dropped samples": (
        "stale_samples",
        {"preprocessor/stale_samples": lambda step: 100.0 * max(0, step - PLANTED)},
    ),
    "rollouts fail": ("failing_rollouts", {"actor/failed_bad_reward": lambda step: 200.0 * max(0, step - PLANTED)}),
    "a trial that failed": ("plain_layers", changed(**{"finetune/compiled_layers": 0.0})),
    "errors in one data set": ("failing_rollouts", changed(**{"actor/sums/no_error": 0.5})),
}


def run(curves: dict[str, Curve], evaluations: dict[int, float] | None = None, last: int = LAST) -> list[Finding]:
    state, health = RunState(), Health(EqualRewards(512, "log"), None, "results/run")
    found = []
    for step in range(1, last + 1):
        if step in (evaluations or {}):
            state.fold_evaluation(evaluation_result(step, evaluations[step], num_rollouts=512))  # type: ignore[index]
        values = {name: curve(step) for name, curve in curves.items()}
        record = MetricRecord(source="finetune_0", step=step, time=float(step), values=values)
        state.fold_metrics(record)
        found += health.metrics(state, record)
    return found


def test_a_healthy_run_has_no_finding() -> None:
    assert not run(HEALTHY, {10: 0.2, 20: 0.25, 30: 0.24, 40: 0.23, 50: 0.26}, last=100)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_20_steps_and_nothing_else_is(fault: str) -> None:
    name, curves = FAULTS[fault]
    (found,) = run(HEALTHY | curves)
    assert found.name == name and PLANTED < found.step <= PLANTED + 20
    assert "RUN_DIR" not in found.line


def test_every_rule_has_a_fault_here_and_a_line_in_the_docs() -> None:
    planted = {name for name, _ in FAULTS.values()} | {"evaluation_falls"}
    assert planted == {rule.__name__ for rule in RULES}
    page = PAGE.read_text(encoding="utf-8")
    counted = {"groups_equal", "starved_trainer", "idle_servers"}
    assert not [name for name in planted | counted if f"| `{name}` |" not in page]


def test_problems_that_are_hard_at_first_and_learned_are_no_finding() -> None:
    """As in sums for a model of 135M on GPUs: 92 % of equal groups, and success of 0.01, then 0.11 and 0.4."""
    learned = {
        "preprocessor/success_rate": lambda step: min(0.5, 0.007 * 1.12**step),
        "finetune/zero_advantage_fraction": lambda step: max(0.65, 0.94 - 0.003 * step),
    }
    assert not run(HEALTHY | learned)
    never = learned | {"preprocessor/success_rate": lambda step: 0.007}
    assert [(each.name, each.step) for each in run(HEALTHY | never, last=40)] == [("reward_saturation", 20)]


@pytest.mark.parametrize(
    ("cut", "steps"),
    [
        # Stories of a model of 135M on GPUs, at most 512 tokens: the first batches are short answers, then long ones.
        (lambda step: [0.15, 0.57, 0.39, 0.4, 0.45, 0.36, 0.39, 0.4, 0.24, 0.28, 0.34][min(step, 11) - 1], []),
        (lambda step: 0.45 - 0.005 * step, []),
        (lambda step: 0.4, [20]),
        (lambda step: 0.7, [10]),
    ],
)
def test_answers_that_are_cut_at_first_may_become_shorter(cut: Curve, steps: list[int]) -> None:
    found = run(HEALTHY | {"preprocessor/cut_fraction": cut}, last=30 if steps else 60)
    assert [(each.name, each.step) for each in found] == [("truncation", step) for step in steps]


def test_evaluations_that_fall_while_the_reward_rises() -> None:
    (found,) = run(HEALTHY, {10: 0.3, 20: 0.5, 30: 0.55, 40: 0.3, 50: 0.2})
    assert (found.name, found.step) == ("evaluation_falls", 50), "one bad evaluation may be chance"
    assert not run(HEALTHY | FLAT, {10: 0.3, 20: 0.5, 30: 0.55, 40: 0.3, 50: 0.2}), "the reward did not rise"
    assert not run(HEALTHY, {10: 0.30, 20: 0.35, 30: 0.32, 40: 0.33, 50: 0.32}), "within the noise of 512 rollouts"


def test_what_lasts_is_said_again() -> None:
    found = run(HEALTHY | FAULTS["cut answers"][1], last=PLANTED + 2 * AGAIN_AFTER_STEPS)
    assert [each.step for each in found] == [found[0].step, found[0].step + AGAIN_AFTER_STEPS]


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")), ids=lambda file: file.stem)
def test_recorded_runs_that_went_well_have_no_finding(file: Path) -> None:
    recorded = json.loads(file.read_bytes())
    state, health = RunState(), Health(EqualRewards(700, "log"), None, "run")
    for step in range(len(recorded["finetune/loss"])):
        values = {name: curve[step] for name, curve in recorded.items() if curve[step] is not None}
        record = MetricRecord(source="finetune_0", step=step, time=float(step), values=values)
        state.fold_metrics(record)
        assert not health.metrics(state, record)


def test_numbers_that_come_at_every_third_step_are_looked_at_too() -> None:
    """The actor records at most every few seconds, also where steps are shorter."""
    name, _ = FAULTS["no answer to be read"]
    state, health = RunState(), Health(EqualRewards(512, "log"), None, "run")
    found = []
    for step in range(1, 150):
        curves = HEALTHY | {"actor/sums/no_answer": lambda step: 0.7 if step > 90 else 0.1}
        values = {key: curve(step) for key, curve in curves.items() if step % 3 == 0 or not key.startswith("actor/")}
        record = MetricRecord(source="x", step=step, time=float(step), values=values)
        state.fold_metrics(record)
        found += health.metrics(state, record)
    assert {each.name for each in found} == {name}


def test_rollouts_of_many_samples_are_counted_as_rollouts() -> None:
    """512 samples of a step are 64 rollouts of 8; 8 failures a step are more than a tenth of them."""
    eight = {"actor/samples_per_rollout": lambda step: 8.0}
    failing = {"actor/failed_bad_reward": lambda step: 8.0 * max(0, step - PLANTED)}
    assert [each.name for each in run(HEALTHY | eight | failing)] == ["failing_rollouts"]
    assert not run(HEALTHY | failing)


def test_findings_are_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "findings.jsonl"
    assert newest_findings(file) == []
    first, second, third = (
        Finding(name=name, step=step, evidence="e", advice="a") for name, step in (("x", 1), ("y", 2), ("x", 3))
    )
    for finding in (first, second, third):
        add_finding(file, finding)
    with file.open("ab") as stream:
        stream.write(b'{"name": "z", "st')
    assert newest_findings(file) == [second, third]


def zero_advantage(step: int, fraction: float | None) -> MetricRecord:
    values = {} if fraction is None else {"finetune/zero_advantage_fraction": fraction}
    return MetricRecord(source="finetune_0", step=step, time=1.0, values=values)


def filtered(samples: int, reason: str = "zero_advantage") -> FateRecord:
    return fate_record("filtered", *map(str, range(samples)), reason=reason, version=1)


def steps_said(watch: EqualRewards, first: int, last: int, fraction: float | None) -> list[int]:
    found = [watch.step(zero_advantage(step, fraction)) for step in range(first, last + 1)]
    return [each.step for each in found if each is not None]


def test_equal_rewards_are_said_after_five_steps_and_then_every_fifty() -> None:
    assert steps_said(EqualRewards(64, "stdout.log"), 1, 120, 1.0) == [5, 55, 105]
    found = EqualRewards(1, "stdout.log").fate(filtered(FILTERED_STEPS))
    assert found is not None and found.name == "groups_equal" and "stdout.log" in found.line


def test_one_step_that_teaches_something_starts_the_count_again() -> None:
    watch = EqualRewards(64, "s")
    assert not steps_said(watch, 1, 4, 1.0)
    assert not steps_said(watch, 5, 5, 0.99)
    assert steps_said(watch, 6, 12, 1.0) == [10]


def test_steps_without_the_number_say_nothing() -> None:
    assert not steps_said(EqualRewards(64, "s"), 1, 200, None)


def test_samples_that_are_all_filtered_are_said_though_no_step_comes() -> None:
    watch = EqualRewards(64, "s")
    found = [watch.fate(filtered(16)) for _ in range(400)]
    assert [index for index, each in enumerate(found) if each] == [79, 319], (
        "20 steps of 64 samples are 80 groups of 16"
    )


def test_a_step_in_between_and_other_reasons_do_not_count() -> None:
    watch = EqualRewards(64, "s")
    for step in range(10):
        assert watch.fate(filtered(15 * 64)) is None, "15 of 16 samples are filtered, and the rest trained"
        assert watch.step(zero_advantage(step, 0.5)) is None
    assert watch.fate(filtered(10_000, reason="too_long")) is None


def waited(number: int, wait_s: float) -> MetricRecord:
    values = {"finetune/step_s": 2.0, "finetune/wait_data_s": wait_s}
    return MetricRecord(source="finetune_0", step=number, time=2.0 * number, values=values)


def idle(time_s: float, *seconds: float) -> MetricRecord:
    values = {f"actor/server_idle_s_{index}": value for index, value in enumerate(seconds)}
    return MetricRecord(source="actor_0", step=0, time=time_s, values=values)


def waits_said(watch: Waits, waits: list[float]) -> list[tuple[str, int]]:
    found = [watch.step(waited(number, wait_s)) for number, wait_s in enumerate(waits, 1)]
    return [(each.name, each.step) for each in found if each is not None]


def test_a_trainer_that_waits_is_said_once() -> None:
    assert waits_said(Waits("do something"), [0.7] * (3 * WAITING_STEPS)) == [("starved_trainer", WAITING_STEPS)]


def test_shorter_waits_are_not_said() -> None:
    assert not waits_said(Waits(""), [0.5] * (3 * WAITING_STEPS))
    assert not waits_said(Waits(""), [1.9] * (WAITING_STEPS - 1))


def test_servers_without_work() -> None:
    """Two servers, 10 s between records: 8 of 20 s idle."""
    watch = Waits("")
    for number in range(4):
        watch.actor(idle(10.0 * number, 5.0, 3.0))
    assert waits_said(watch, [0.0] * WAITING_STEPS) == [("idle_servers", WAITING_STEPS)]
    assert not waits_said(watch, [0.0] * WAITING_STEPS), "nothing is known of these steps"
