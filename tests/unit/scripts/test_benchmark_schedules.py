"""The figures of the benchmark of schedules, from a run that is written down here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fakes.script_module import load_script

from pipelinerl.config.compose import compose


def test_figures_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_script("benchmark_schedules", monkeypatch)
    summary = {
        "samples_per_second": 8.0,
        "output_tokens_per_second": 80.0,
        "seconds": 10.0,
        "stall_fraction": 0.1,
        "mean_lag_versions": 0.5,
        "max_lag_versions": 1,
        "multi_version_samples": 3,
        "success_after": 0.95,
    }
    success = "evaluation/test/success_rate"
    rows = [
        {"time": 100.0, "source": "weight_update"},
        {"time": 103.0, "source": "evaluation", success: 0.5},
        {
            "time": 105.0,
            "source": "finetune_0",
            "finetune/idle_s": 0.5,
            "finetune/step_s": 4.0,
            "finetune/train_s": 3.0,
            "finetune/ess": 1.0,
        },
        {"time": 108.0, "source": "finetune_0", "finetune/step_s": 6.0, "finetune/train_s": 2.0, "finetune/ess": 0.5},
        {"time": 99.0, "source": "actor_0", "actor/server_load_0": 0.0, "actor/server_idle_s_0": 50.0},
        {"time": 101.0, "source": "actor_0", "actor/server_load_0": 2.0, "actor/server_idle_s_0": 9.0},
        {"time": 109.0, "source": "actor_0", "actor/server_load_0": 6.0, "actor/server_idle_s_0": 3.0},
        {"time": 112.0, "source": "evaluation", success: 0.9},
        {"time": 115.0, "source": "evaluation", success: 0.95},
    ]
    found = benchmark.figures(summary, rows, concurrency=8, success=0.9)
    assert found["trainer_busy"] == 0.5 and found["ess"] == 0.75
    # 1 s with 2 rollouts of 8, of which all idle seconds but one were before the first weights; then 8 s with 6.
    assert found["server_load"] == pytest.approx((1 * 2 + 8 * 6) / 9 / 8)
    assert (found["server_idle_s"], found["idle_gpu_s"]) == (4.0, 4.5)
    assert found["seconds_to_success"] == 12.0
    assert benchmark.figures(summary, rows, concurrency=8, success=0.99)["seconds_to_success"] is None
    table = benchmark.spread([{"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0}])
    assert table["a"] == {"median": 2.0, "range": [1.0, 3.0], "values": [1.0, 3.0]}
    assert table["b"] == {"median": 2.0, "range": [2.0, 2.0], "values": [None, 2.0]}


def test_both_variances_have_the_same_mean_length(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_script("benchmark_schedules_task", monkeypatch)
    draws = [(index + 0.5) / 1000 for index in range(1000)]
    assert {task.answer_tokens(40, "low", draw) for draw in draws} == {40}
    high = [task.answer_tokens(40, "high", draw) for draw in draws]
    assert set(high) == {20, 220} and sum(high) / 1000 == 40


def test_a_run_that_is_refused_is_said_and_the_next_one_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = load_script("benchmark_schedules", monkeypatch)
    output = tmp_path / "schedules.json"
    words = ["--schedules", "conventional", "pipeline", "--variances", "low", "--model", str(tmp_path / "model")]
    words += ["--output", str(output), "--keep", str(tmp_path / "kept"), "--", "llm.parameters.top_p=0.5"]
    monkeypatch.setattr(sys, "argv", ["benchmark_schedules.py", *words])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 1
    tables = json.loads(output.read_text())["results"]["low"]
    assert list(tables) == ["conventional", "pipeline"]
    for table in tables.values():
        [failed] = table["failed"]
        assert failed.startswith("seed 1: ") and "llm.parameters.top_p: got 0.5" in failed


@pytest.mark.parametrize(("graphs", "mode"), [("decode", "FULL_DECODE_ONLY"), ("piecewise", "FULL_AND_PIECEWISE")])
def test_graphs_and_settings_of_servers_reach_the_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graphs: str, mode: str
) -> None:
    benchmark = load_script("benchmark_schedules", monkeypatch)
    given: list[list[str]] = []

    def run_once(args: object, folder: Path, model: str, words: list[str]) -> dict[str, float]:
        given.append(words)
        return {"seconds": 1.0}

    monkeypatch.setattr(benchmark, "run_once", run_once)
    words = ["--device", "cuda", "--graphs", graphs, "--schedules", "pipeline", "--variances", "high", "--model", "x"]
    words += ["--", "vllm_config.kv_cache=recompute"]
    monkeypatch.setattr(sys, "argv", ["benchmark_schedules.py", *words])
    with pytest.raises(SystemExit, match="False"):
        benchmark.main()
    (tmp_path / "schedules.yaml").write_text(benchmark.CONFIG)
    words = ["--config-dir", str(tmp_path), "--config-name", "schedules", f"output_dir={tmp_path}", "model_path=x"]
    servers = compose([*words, *given[0]]).config.vllm_config
    assert servers.vllm_kwargs["compilation-config"]["cudagraph_mode"] == mode
    assert servers.kv_cache == "recompute"
