"""The benchmark of splits without GPUs: its list, its figures, its samples of nvidia-smi, and splits that fail."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.script_module import load_script

from pipelinerl.config import RunConfig
from pipelinerl.config.compose import compose
from pipelinerl.world import Cluster, build_world_map

MIB_PER_GIB = 1024


class CountingPorts:
    def __init__(self) -> None:
        self._last = 20_000

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        self._last += 1
        return self._last


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmark_splits_list", monkeypatch)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmark_splits_figures", monkeypatch)


@pytest.fixture
def benchmark(listed: ModuleType, measured: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmark_splits", monkeypatch)


def settings_of(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["benchmark_splits.py", *words])
    args: argparse.Namespace = benchmark.arguments()
    return args


def composed(benchmark: ModuleType, args: argparse.Namespace, split: Any, folder: Path) -> RunConfig:
    (folder / "splits.yaml").write_text(benchmark.CONFIG)
    words = [f"output_dir={folder / 'run'}", "model_path=x", *benchmark.overrides_of(args, split)]
    config = compose(["--config-dir", str(folder), "--config-name", "splits", *words]).config
    assert config is not None
    return config


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_split_is_a_run_that_can_be_placed(
    benchmark: ModuleType, listed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, device: str
) -> None:
    args = settings_of(benchmark, monkeypatch, "--device", device, "--gpus", str(gpus), "--graphs")
    for split in listed.SPLITS[gpus]:
        assert split.gpus == gpus, f"{split.name} leaves GPUs alone"
        config = composed(benchmark, args, split, tmp_path)
        cluster = Cluster.from_env({}, lambda: [f"GPU-{index}" for index in range(gpus if device == "cuda" else 0)], 4)
        world = build_world_map(config, cluster, CountingPorts())
        servers, ranks = world.jobs_of("actor_llm"), world.jobs_of("finetune")
        assert len(servers) == len(split.servers) and len(ranks) == len(split.ranks)
        assert len(world.jobs_of("preprocessor_llm")) == len(split.reference)
        assert world.device == device
        if device == "cuda":
            assert [tuple(int(gpu) for gpu in job.gpus) for job in servers] == list(split.servers)
            assert [int(gpu) for job in ranks for gpu in job.gpus] == list(split.ranks)


def test_names_of_splits_are_checked(listed: ModuleType) -> None:
    assert [split.name for split in listed.chosen(8, ["3servers-1rank", "2servers-1rank"])] == [
        "3servers-1rank",
        "2servers-1rank",
    ]
    assert listed.chosen(4, None) == list(listed.DEFAULTS[4])
    with pytest.raises(ValueError, match="got 3servers-1rank, expected with --gpus 2: tp2-colocated-zero3"):
        listed.chosen(2, ["3servers-1rank"])
    names = [split.name for splits in listed.SPLITS.values() for split in splits]
    assert len(set(names)) == len(names)


def step(train_s: float, idle_s: float, tokens: float, peak_gib: float) -> dict[str, Any]:
    return {
        "source": "finetune_0",
        "finetune/step_s": train_s + idle_s,
        "finetune/train_s": train_s,
        "finetune/idle_s": idle_s,
        "finetune/tokens": tokens,
        "finetune/samples": 8.0,
        "finetune/gpu_memory_peak_gib": peak_gib,
    }


def update(version: int, transfer_s: float, time: float = 0.0) -> dict[str, Any]:
    seconds = {"pause": 0.001, "start": 0.002, "transfer": transfer_s, "load": 0.003, "resume": 0.004, "total": 1.0}
    row = {f"weight_update/{name}_s": value for name, value in seconds.items()}
    return {"source": "weight_update", "step": version, "time": time, **row}


def test_figures_of_a_run(measured: ModuleType) -> None:
    rows = [
        update(0, 5.0),
        step(90.0, 10.0, 100.0, 7.0),  # the first step: everything is warmed up in it
        update(1, 0.05),
        step(2.0, 3.0, 4000.0, 8.0),
        update(2, 0.15),
        step(2.0, 1.0, 4000.0, 6.0),
    ]
    settings = {"bytes_per_weight": 2.0, "peak_tflops": 1.0}
    found = measured.figures(rows, ranks=2, server_gpus=3, parameters=10**9, settings=settings)
    assert found["steps"] == 3 and found["updates"] == 3
    assert found["samples_per_s"] == 16 / 8 and found["trainer_tokens_per_s"] == 1000.0
    assert found["trainer_tokens_per_s_in_training"] == 2000.0
    assert found["update_s"]["transfer"] == pytest.approx(0.1) and found["update_s"]["load"] == 0.003
    assert found["paused_ms"] == pytest.approx(110.0)
    assert found["servers_paused_gpu_s"] == pytest.approx(3 * 0.22)
    assert found["trainer_idle_gpu_s"] == 2 * 4.0
    assert found["trainer_peak_gib"] == 8.0
    # 1e9 weights of 2 bytes in 0.1 s; 6 x 1e9 x 2000 operations a second on two cards of 1e12.
    assert found["transfer_gb_per_s"] == pytest.approx(20.0) and found["mfu"] == pytest.approx(6.0)


def test_a_run_that_ended_early_has_what_it_recorded(measured: ModuleType, tmp_path: Path) -> None:
    settings = {"bytes_per_weight": 2.0, "peak_tflops": 0.0}
    assert measured.rows_of(tmp_path) == []
    nothing = measured.figures([], 1, 1, None, settings)
    assert nothing["steps"] == 0 and nothing["samples_per_s"] is None and nothing["update_s"]["pause"] is None
    assert measured.begin_of_training([]) is None
    first = update(0, 0.5, time=17.0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(first) + '\n{"time": 1.0, "st')
    rows = measured.rows_of(tmp_path)
    assert rows == [first] and measured.begin_of_training(rows) == 17.0
    assert measured.figures(rows, 1, 1, None, settings)["update_s"]["transfer"] == 0.5


def test_memory_and_idle_time_of_cards_and_processes(measured: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    environs = {
        11: {measured.SPLIT_KEY: "mine", "PIPELINERL_JOB": "actor_llm_0"},
        12: {measured.SPLIT_KEY: "other", "PIPELINERL_JOB": "actor_llm_0"},
    }

    class FakeProcess:
        def __init__(self, pid: int) -> None:
            if pid not in environs:
                raise measured.psutil.NoSuchProcess(pid)
            self._pid = pid

        def environ(self) -> dict[str, str]:
            return environs[self._pid]

    monkeypatch.setattr(measured.psutil, "Process", FakeProcess)
    sampler = measured.GPUSampler("mine")
    sampler.take("0, GPU-a, 1000, 0\n1, GPU-b, 50, [N/A]\n", "GPU-a, 11, 700\nGPU-a, 12, 300\nGPU-a, 99, 9\n", 100.0)
    sampler.take("0, GPU-a, 3000, 75\n1, GPU-b, 40, [N/A]\n", "GPU-a, 11, 900\nGPU-a, 11, [N/A]\n", 104.0)
    sampler.take("0, GPU-a, 2000, 100\n1, GPU-b, 40, [N/A]\n", "", 106.0)
    assert sampler.cards == {0: 3000.0, 1: 50.0}
    assert sampler.processes == {"actor_llm_0 (pid 11) on GPU 0": 900.0}
    assert sampler.idle_s(0.0) == {0: 4 * 0.25}
    assert sampler.idle_s(101.0) == {0: 0.0}


def test_the_table(measured: ModuleType) -> None:
    phases = {"pause": 0.001, "start": None, "transfer": 0.0205, "load": 0.003, "resume": 0.0, "total": 1.0}
    rows = [
        {"split": "a", "status": "ok", "samples_per_s": 12.345, "update_s": phases, "cards_peak_gib": {1: 2.0, 0: 1.5}},
        {"split": "b", "status": "failed", "error": "no | room\nhere"},
    ]
    lines = measured.markdown(rows).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| 12.3 |" in lines[2] and "1.0 / - / 20.5 / 3.0 / 0.0" in lines[2] and "1.5, 2.0" in lines[2]
    assert lines[3].endswith("| no / room here |")


def test_a_split_that_fails_or_raises_does_not_end_the_others(
    benchmark: ModuleType, listed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    args = settings_of(benchmark, monkeypatch, "--device", "cpu", "--parallel", "2", "--output", str(output))
    splits = list(listed.SPLITS[2][:3])

    def run_split(args: argparse.Namespace, split: Any, folder: Path, model: Path) -> dict[str, Any]:
        if split is splits[0]:
            raise OSError("no disk")
        return {"split": split.name, "status": "ok" if split is splits[1] else "late", "error": None}

    monkeypatch.setattr(benchmark, "run_split", run_split)
    rows = benchmark.run_all(args, splits, tmp_path, tmp_path / "model")
    assert [row["status"] for row in rows] == ["failed", "ok", "late"]
    assert rows[0]["error"] == "OSError: no disk"
    assert json.loads(output.read_text())["splits"] == rows


def test_a_run_that_is_refused_is_a_row_with_its_error(
    benchmark: ModuleType, listed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = settings_of(
        benchmark, monkeypatch, "--device", "cpu", "--timeout-s", "600", "--", "llm.parameters.top_p=0.5"
    )
    row = benchmark.run_split(args, listed.SPLITS[2][1], tmp_path, tmp_path / "model")
    assert row["status"] == "failed" and row["exit_code"] == 2 and row["steps"] == 0
    assert "llm.parameters.top_p: got 0.5" in row["error"]


def test_a_run_that_is_late_is_ended(benchmark: ModuleType, tmp_path: Path) -> None:
    waits = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    code, late = benchmark.run_bounded(waits, tmp_path, tmp_path / "output.txt", 0.5, {})
    assert late and code != 0
    says = [sys.executable, "-c", "import os; print(os.environ['WORD'])"]
    assert benchmark.run_bounded(says, tmp_path, tmp_path / "output.txt", 60, {"WORD": "kept"}) == (0, False)
    assert (tmp_path / "output.txt").read_text() == "kept\n"


@pytest.mark.parametrize(
    ("reason", "printed", "expected"),
    [
        ("actor_llm_0 ended:\n  no memory", "error: other\n", "actor_llm_0 ended: no memory"),
        (None, "starting\nerror: world: too few\n\nbye\n", "error: world: too few"),
        (None, "starting\nbye\n", "bye"),
        (None, "", "it said nothing"),
    ],
)
def test_the_last_error(benchmark: ModuleType, tmp_path: Path, reason: str | None, printed: str, expected: str) -> None:
    if reason is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"reason": reason}))
    (tmp_path / "launch.txt").write_text(printed)
    assert benchmark.last_line(tmp_path, tmp_path / "launch.txt") == expected


def test_an_unknown_split_is_a_usage_error(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark_splits.py", "--gpus", "2", "--splits", "nope"])
    with pytest.raises(SystemExit) as ended:
        benchmark.arguments()
    assert ended.value.code == 2
    assert "--splits: got nope, expected with --gpus 2: tp2-colocated-zero3" in capsys.readouterr().err
