"""The list of measurements: every command is understood by what it starts, every run composes, the plan is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.script_module import SCRIPTS, load_script

from pipelinerl.config import RunConfig
from pipelinerl.config.compose import compose
from pipelinerl.world import Cluster, build_world_map

REPOSITORY = SCRIPTS.parent


class CountingPorts:
    def __init__(self) -> None:
        self._last = 20_000

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        self._last += 1
        return self._last


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    names = (
        "benchmark_server",
        "benchmark_schedules",
        "benchmark_splits_list",
        "benchmark_splits_figures",
        "benchmark_splits",
    )
    parts = ("plan", "process", "machine", "commands", "one_card", "list", "figures", "results")
    loaded = {
        name: load_script(name, monkeypatch) for name in (*names, *(f"gpu_measurements_{part}" for part in parts))
    }
    return {**loaded, "gpu_measurements": load_script("gpu_measurements", monkeypatch)}


def words_of_run(scripts: dict[str, ModuleType], measured: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line of the run that a measurement makes; of a server alone what its script understands."""
    words = scripts["gpu_measurements"].command_of(measured, "MODEL", folder)
    if words[1:3] == ["-m", "pipelinerl.launch"]:
        return words[3:]
    script = scripts[Path(words[1]).stem]
    assert (REPOSITORY / words[1]).is_file()
    monkeypatch.setattr(sys, "argv", words[1:])
    args = script.arguments()
    assert args.output.name == "result.json"
    if script is scripts["benchmark_server"]:
        return [f"world.device={args.device}"]
    assert args.keep.name == "runs"
    if script is scripts["benchmark_schedules"]:
        overrides = script.overrides_of(args, args.schedules[0], args.variances[0], seed=1)
    else:
        (split,) = script.chosen(args.gpus, args.splits)
        overrides = script.overrides_of(args, split)
    (folder / "task.yaml").write_text(script.CONFIG)
    return ["--config-dir", str(folder), "--config-name", "task", f"output_dir={folder}", "model_path=x", *overrides]


def test_every_run_composes_and_uses_all_its_cards(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = scripts["gpu_measurements_list"].measurements(small_cards=True)
    for measurement in (one for one in listed if one.kind not in ("tests", "server")):
        config = compose(words_of_run(scripts, measurement, tmp_path, monkeypatch)).config
        assert isinstance(config, RunConfig), measurement.name
        cards = tuple(str(number) for number in range(measurement.gpus))
        cluster = Cluster(1, 0, "127.0.0.1", None, ("127.0.0.1",), cards, 16 * len(cards))
        jobs = build_world_map(config, cluster, CountingPorts()).jobs
        assert {card for job in jobs for card in job.gpus} == set(cards), measurement.name


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_is_understood(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    listed = scripts["gpu_measurements_list"].measurements(device)
    assert len({measurement.name for measurement in listed}) == len(listed)
    for measurement in listed:
        words = scripts["gpu_measurements"].command_of(measurement, "MODEL", tmp_path)
        assert words[0] == sys.executable and not any("{" in word for word in words)
        assert measurement.expected_s < measurement.limit_s
        if measurement.kind != "tests":
            overrides = words_of_run(scripts, measurement, tmp_path, monkeypatch)
            assert ("world.device=cpu" in overrides) == (device == "cpu"), measurement.name


def test_the_tests_that_are_named_exist(scripts: dict[str, ModuleType]) -> None:
    listed = scripts["gpu_measurements_list"].measurements()
    for measurement in (one for one in listed if one.kind == "tests"):
        named = [word.partition("::") for word in measurement.command if word.startswith("tests/gpu/")]
        files = [REPOSITORY / file for file, _, _ in named]
        assert files and all(file.is_file() for file in files)
        for file, (_, _, name) in zip(files, named, strict=True):
            assert not name or f"\ndef {name}(" in file.read_text()
        if "-k" in measurement.command:
            wanted = measurement.command[measurement.command.index("-k") + 1].removeprefix("not ")
            assert (
                sum(wanted in line for line in files[0].read_text().splitlines() if line.startswith("def test_")) == 1
            )


def test_with_one_card_what_needs_one_comes_first_and_else_nothing_changes(scripts: dict[str, ModuleType]) -> None:
    made, plan = scripts["gpu_measurements_list"].measurements, scripts["gpu_measurements_plan"].plan
    alone = [job.measurement for job in plan(made(gpus=1), ["0"], 1e5)]
    groups = [one.group for one in alone]
    assert groups[:4] == ["onecard"] * 4 and groups[-3:] == ["server"] * 3 and set(groups[4:-3]) == {"tests"}
    for count in (2, 4):
        cards = [str(number) for number in range(count)]
        listed = made(gpus=count)
        first = [one.group for one in listed].index("onecard")
        several, own = listed[:first], listed[first:]
        assert {one.gpus for one in own} == {1} and {one.group for one in own} == {"onecard", "tests", "server"}
        for end_s in (1400, 1e5):
            planned = plan(listed, cards, end_s)
            assert [job for job in planned if job.measurement not in own] == plan(several, cards, end_s)


def test_server_and_trainer_on_one_card_work_at_the_same_time(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for small in (False, True):
        listed = scripts["gpu_measurements_list"].measurements(small_cards=small)
        for measurement in (one for one in listed if one.group == "onecard"):
            config = compose(words_of_run(scripts, measurement, tmp_path, monkeypatch)).config
            world = build_world_map(
                config, Cluster(1, 0, "127.0.0.1", None, ("127.0.0.1",), ("7",), 16), CountingPorts()
            )
            on_card = {job.kind: job for job in world.jobs if job.gpus}
            assert set(on_card) == {"actor_llm", "finetune"} and world.transport_to(on_card["actor_llm"]) == "ipc"
            assert config.schedule == "pipeline" and config.world.placement != "colocated"
            # 256 sequences of 512 tokens with 30 layers, 3 heads of 64, keys and values, 2 bytes.
            assert config.vllm_config.vllm_kwargs["kv-cache-memory-bytes"] >= 256 * 512 * 30 * 3 * 64 * 2 * 2


def test_the_plan_says_what_starts_when_and_what_does_not_fit(scripts: dict[str, ModuleType]) -> None:
    main, plan = scripts["gpu_measurements"], scripts["gpu_measurements_plan"]
    made = [
        plan.Measurement(name, "g", f"what {name} is", gpus, 100.0, 200.0, "tests", ())
        for name, gpus in (("first", 2), ("second", 2), ("third", 2), ("wide", 4))
    ]
    lines = main.listing(made, ["0", "1"], 230 + main.GRACE_S).splitlines()
    assert [line.split()[:5] for line in lines[3:]] == [
        ["0", "100", "200", "0,1", "first"],
        ["100", "200", "200", "0,1", "second"],
        ["-", "100s", "200", "no", "time"],
        ["-", "100s", "200", "4", "GPUs"],
    ]


def test_a_rehearsal_needs_no_gpus(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = scripts["gpu_measurements_machine"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a,7")
    assert machine.cards_here(None, pretend=False) == ["5", "GPU-a", "7"]
    assert machine.cards_here(2, pretend=True) == ["5", "GPU-a"]
    assert machine.cards_here(4, pretend=True) == ["0", "1", "2", "3"]
    with pytest.raises(SystemExit, match="there are 3, expected 4"):
        machine.cards_here(4, pretend=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.cards_here(None, pretend=True) == ["0", "1"]
    with pytest.raises(SystemExit, match="there are 0, expected some"):
        machine.cards_here(None, pretend=False)
