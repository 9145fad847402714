"""The benchmark of whole runs: every variant composes, figures are right, and a failed run is a row of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fakes.script_module import load_script

from pipelinerl.config.compose import compose


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmark_runs", monkeypatch)


@pytest.mark.parametrize(("name", "device"), [("schedules", "cpu"), ("splits", "cuda")])
def test_variants_compose(benchmark: ModuleType, tmp_path: Path, name: str, device: str) -> None:
    """Every fourth: a plain one, one with each of DeepSpeed and FSDP, two on the same GPUs."""
    args = benchmark.arguments([name, "--device", device])
    (tmp_path / "benchmark.yaml").write_text(benchmark.CONFIG)
    base = ["--config-dir", str(tmp_path), "--config-name", "benchmark", f"output_dir={tmp_path}", "model_path=x"]
    for words in list(benchmark.SETS[name](args).values())[::4]:
        config = compose([*base, *benchmark.shared_words(args, seed=3), *words]).config
        assert config.seed == 3 and config.custom["variance"] in ("low", "high")
        if device == "cuda":
            graphs = config.vllm_config.vllm_kwargs["compilation-config"]
            assert graphs["cudagraph_mode"] == "FULL_DECODE_ONLY"


def test_overrides_follow_the_options(benchmark: ModuleType) -> None:
    args = benchmark.arguments(["splits", "--only", "one-card", "--steps", "3", "--", "a=1", "b=2"])
    assert (args.set, args.only, args.steps, args.overrides) == ("splits", ["one-card"], 3, ["a=1", "b=2"])


def test_own_variants(benchmark: ModuleType) -> None:
    args = benchmark.arguments(["own", "--variance", "low", "--variant", "a: x=1 y=2", "b:"])
    assert benchmark.own(args) == {"a": ["x=1", "y=2", "+custom.variance=low"], "b": ["+custom.variance=low"]}


def test_figures_of_a_run(benchmark: ModuleType) -> None:
    summary = dict.fromkeys(
        (
            *("output_tokens_per_second", "seconds", "stall_fraction", "mean_lag_versions", "max_lag_versions"),
            *("multi_version_samples", "success_after", "logprob_abs_diff_mean"),
        ),
        1.0,
    )
    success = "evaluation/test/success_rate"
    update = {"source": "weight_update", **{f"weight_update/{phase}_s": 0.01 for phase in benchmark.PHASES}}
    first_step = {"finetune/step_s": 40.0, "finetune/samples": 1, "finetune/tokens": 1, "finetune/train_s": 1.0}
    rows = [
        {"time": 99.0, "source": "actor_0", "actor/server_load_0": 0.0, "actor/server_idle_s_0": 50.0},
        {"time": 100.0, **update, "step": 0, "weight_update/pause_s": 9.0},
        {"time": 101.0, "source": "actor_0", "actor/server_load_0": 2.0, "actor/server_idle_s_0": 9.0},
        {"time": 103.0, "source": "evaluation", success: 0.5},
        {"time": 104.0, "source": "finetune_0", **first_step},
        {"time": 105.0, **update, "step": 1},
        {"time": 108.0, "source": "finetune_0", **first_step, "finetune/step_s": 4.0, "finetune/samples": 8},
        {"time": 109.0, "source": "actor_0", "actor/server_load_0": 6.0, "actor/server_idle_s_0": 3.0},
        {"time": 112.0, "source": "evaluation", success: 0.9},
    ]
    found = benchmark.figures(summary, rows, concurrency=8, success=0.9)
    # The first step and the update of version 0 are left out.
    assert (found["samples_per_s"], found["step_s"], found["trainer_busy"]) == (2.0, 4.0, 0.25)
    assert found["paused_ms"] == pytest.approx(40.0) and found["pause_ms"] == pytest.approx(10.0)
    # 1 s with 2 rollouts of 8 (all but 1 s of the idle time came before the first weights), then 8 s with 6.
    assert found["server_load"] == pytest.approx((1 * 2 + 8 * 6) / 9 / 8) and found["server_idle_s"] == 4.0
    assert found["seconds_to_success"] == 12.0
    assert benchmark.figures(summary, rows, concurrency=8, success=0.99)["seconds_to_success"] is None


def test_spread_over_repeats(benchmark: ModuleType) -> None:
    table = benchmark.over_repeats([{"a": 1.0, "b": None}, {"error": "late"}, {"a": 3.0, "b": 2.0}])
    assert table["a"] == {"median": 2.0, "range": [1.0, 3.0], "values": [1.0, 3.0]}
    assert table["b"] == {"median": 2.0, "range": [2.0, 2.0], "values": [None, 2.0]}
    assert table["errors"] == ["late"]


def test_both_variances_have_the_same_mean_length(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_script("benchmark_task", monkeypatch)
    draws = [(index + 0.5) / 1000 for index in range(1000)]
    assert {task.answer_tokens(40, "low", draw) for draw in draws} == {40}
    high = [task.answer_tokens(40, "high", draw) for draw in draws]
    assert set(high) == {20, 220} and sum(high) / 1000 == 40


def test_a_failed_run_does_not_end_the_others(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_once(args: object, folder: Path, model: Path, words: list[str]) -> dict[str, object]:
        return {"error": "no server"} if "schedule=concurrent" in words else {"seconds": 1.0}

    monkeypatch.setattr(benchmark, "run_once", run_once)
    output = tmp_path / "result.json"
    names = ["concurrent-low", "pipeline-low"]
    words = ["schedules", "--only", *names, "--model", "x", "--output", str(output), "--keep", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmark_runs.py", *words])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 1
    results = json.loads(output.read_text())["results"]
    assert results["concurrent-low"] == {"errors": ["no server"]} and results["pipeline-low"]["seconds"]["median"] == 1


@pytest.mark.parametrize(
    ("reason", "printed", "expected"),
    [
        ("why", "Error: x\n", "why"),
        (None, "a\nError: x\nb\n", "Error: x"),
        (None, "a\nb\n", "b"),
        (None, "", "no output"),
    ],
)
def test_last_error_of_a_run(
    benchmark: ModuleType, tmp_path: Path, reason: str | None, printed: str, expected: str
) -> None:
    (tmp_path / "out").write_text(printed)
    if reason is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"reason": reason}))
    assert benchmark.last_line(tmp_path, tmp_path / "out") == expected
