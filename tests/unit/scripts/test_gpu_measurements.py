"""The list of GPU measurements: every command is accepted, and each has its GPUs and cores to itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from fakes.script_module import load_script

from pipelinerl.config.compose import compose

#: Notes when it began and ended, its GPUs and cores. Arguments after the first: notes of others that run meanwhile.
COMMAND = """
import json, os, sys, time
from pathlib import Path
begun = time.monotonic()
own, *others = map(Path, sys.argv[1:])
own.with_suffix(".begun").touch()
while not all(other.with_suffix(".begun").exists() for other in others):
    time.sleep(0.01)
note = [begun, time.monotonic(), os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0))]
own.write_text(json.dumps(note))
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("gpu", monkeypatch)


class Accepted(Exception):
    """The words were parsed."""


def test_every_command_is_accepted(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepting(parse: Callable[..., Any]) -> Callable[..., Any]:
        def parsed(*words: Any) -> None:
            parse(*words)
            raise Accepted

        return parsed

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, accepting(getattr(argparse.ArgumentParser, name)))
    for measurement in gpu.measurements("a/model", tmp_path / "with space").values():
        for command in measurement.commands:
            match command:
                case ["-m", "pipelinerl.launch", *words]:
                    config = compose(words).config
                    assert config.output_dir.endswith(measurement.name)
                    if measurement.name == "gsm8k-1":
                        assert config.actor.examples[0].answer == r"3 + 4 = 7. \boxed{7}"
                case ["-m", "pytest", *_]:
                    pass
                case [script, *words]:
                    monkeypatch.setattr(sys, "argv", [script, *words])
                    with pytest.raises(Accepted):
                        load_script(Path(script).stem, monkeypatch).main()


async def test_each_has_its_gpus_and_cores_to_itself(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    meanwhile = {"both-2": [], "a-1": ["b-1"], "b-1": ["a-1"], "c-1": []}
    chosen = [
        gpu.Measurement(name, (("-c", COMMAND, *(str(tmp_path / f"{one}.note") for one in (name, *others))),))
        for name, others in meanwhile.items()
    ]
    assert await gpu.run_all(chosen, tmp_path, gpu.Machine(2), 60)
    notes = {one.name: json.loads((tmp_path / f"{one.name}.note").read_text()) for one in chosen}
    assert notes["both-2"][2] == "6,7" and {notes["a-1"][2], notes["b-1"][2]} == {"6", "7"}
    assert notes["both-2"][3] == sorted(os.sched_getaffinity(0))
    assert notes["both-2"][0] >= max(notes[name][1] for name in ("a-1", "b-1", "c-1"))
    # Two ran at once, on different cores where there are two.
    assert len(os.sched_getaffinity(0)) < 2 or not {*notes["a-1"][3]} & {*notes["b-1"][3]}


async def test_what_a_late_measurement_started_ends_with_it(gpu: ModuleType, tmp_path: Path) -> None:
    note = tmp_path / "child"
    start = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); "
    wait = f"open({str(note)!r}, 'w').write(str(child.pid)); child.wait()"
    late = gpu.Measurement("late-1", (("-c", start + wait),))
    assert not await asyncio.wait_for(gpu.run_all([late], tmp_path, gpu.Machine(1), 3), 60)

    def is_running() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(int(note.read_text())).status() != psutil.STATUS_ZOMBIE
        return False

    # Killed processes take a moment to end.
    for _ in range(200):
        if is_running():
            await asyncio.sleep(0.05)
    assert not is_running()


async def test_a_failure_is_a_row_and_the_others_run(gpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bad-1.json").write_text("{")
    summary = {"success_after": 0.75, "seconds": 12.0}
    write = f"import json; json.dump({summary}, open({str(tmp_path / 'good-1' / 'summary.json')!r}, 'w'))"
    (tmp_path / "good-1").mkdir()
    chosen = [
        gpu.Measurement("bad-1", (("-c", "raise SystemExit(3)"), ("-c", "open('never', 'w')"))),
        gpu.Measurement("late-1", (("-c", "import time; time.sleep(60)"),)),
        gpu.Measurement("good-1", (("-c", write),)),
    ]
    assert not await asyncio.wait_for(gpu.run_all(chosen, tmp_path, gpu.Machine(1), 5), 120)
    rows = {row.split(" | ")[0].strip("| "): row for row in (tmp_path / "table.md").read_text().splitlines()[2:]}
    assert "exit status 3" in rows["bad-1"] and "exit status 124" in rows["late-1"]
    assert "success_after 0.75" in rows["good-1"] and "exit status" not in rows["good-1"]


def test_figures_are_read_from_what_a_measurement_left(gpu: ModuleType, tmp_path: Path) -> None:
    nested = {"eager": {"tokens/s": {"median": 50000.0}, "gradient error": {"median": 0.02}}}
    (tmp_path / "tests-1.xml").write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="0" skipped="2"/></testsuites>'
    )
    (tmp_path / "runs-1.json").write_text(
        json.dumps({"results": {"split": {"step_s": {"median": 1.25}}, "bad": {"errors": ["x"]}, "16384": nested}})
    )
    (tmp_path / "league-1").mkdir()
    run = {"task": "sums", "system": "ours", "seed": 1, **dict.fromkeys(gpu.LEAGUE_FIGURES, 2.0)}
    (tmp_path / "league-1" / "league.json").write_text(json.dumps({"runs": [run, {**run, "error": "late"}]}))
    assert list(gpu.results("tests-1", tmp_path)) == ["9 tests, 1 failures, 0 errors, 2 skipped"]
    assert list(gpu.results("runs-1", tmp_path)) == [
        "split: step_s 1.25",
        "bad: x",
        "16384: eager: tokens/s 5e+04",
    ]
    good, failed = gpu.results("league-1", tmp_path)
    assert good.startswith("ours sums seed 1: samples_per_s 2") and failed == "ours sums seed 1: late"
