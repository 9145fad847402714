"""A session of measurements with small real processes: limits, goals, what is killed, what is kept."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from fakes.script_module import load_script

#: A child of its own session that ignores SIGTERM, and a parent that does or does not.
STUBBORN = """
import signal, subprocess, sys, time
from pathlib import Path
child = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
Path(sys.argv[1], "child").write_text(str(process.pid))
if sys.argv[2] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] != "leave":
    print("waits", flush=True)
    time.sleep(600)
"""
LEARNS = """
import json, sys, time
from pathlib import Path
with Path(sys.argv[1], "metrics.jsonl").open("w", buffering=1) as rows:
    for success in (0.7, 0.5, 0.6, 0.65):
        print(json.dumps({"other": 1}), json.dumps({"success": success}), sep="\\n", file=rows)
    time.sleep(600)
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    names = ("plan", "process", "machine", "commands", "one_card", "list", "figures", "results")
    parts = {name: load_script(f"gpu_measurements_{name}", monkeypatch) for name in names}
    monkeypatch.setattr(parts["process"], "WATCH_S", 0.05)
    monkeypatch.setattr(parts["process"], "_LEFTOVER_GRACE_S", 0.5)
    yield {**parts, "main": load_script("gpu_measurements", monkeypatch)}


def made(scripts: dict[str, ModuleType], name: str, code: str, *words: str, **others: Any) -> Any:
    given = dict(group="g", what="", gpus=1, expected_s=1.0, limit_s=60.0, kind="tests") | others
    command = ("{python}", "-c", code, "{work}", *words)
    return scripts["plan"].Measurement(name=name, command=command, **given)


def measure(
    scripts: dict[str, ModuleType], folder: Path, *measured: Any, limit_s: float = 120, grace_s: float = 1
) -> Any:
    known = ("name", "group", "what", "gpus", "expected_s", "limit_s")
    records = [scripts["results"].Record(**{name: getattr(one, name) for name in known}) for one in measured]
    summary = scripts["results"].Summary(folder / "out", {"limit_s": limit_s}, records)
    session = scripts["main"].Session(summary, ["0", "1"], "MODEL", folder / "scratch", grace_s)
    session.measure(measured, limit_s)
    found = json.loads((folder / "out" / "summary.json").read_text())
    return {record["name"]: record for record in found["measurements"]}


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_measurements_run_side_by_side_on_their_cards(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], *sys.argv[2:]); sys.exit(int(sys.argv[2]))"
    found = measure(
        scripts,
        tmp_path,
        made(scripts, "fine", code, "0", "{model}"),
        made(scripts, "broken", code, "3"),
        made(scripts, "wide", code, "0", gpus=2),
        made(scripts, "too-wide", code, "0", gpus=3),
    )
    assert {name: (record["status"], record["exit_code"], record["cards"]) for name, record in found.items()} == {
        "fine": ("ok", 0, ["0"]),
        "broken": ("failed", 3, ["1"]),
        "wide": ("ok", 0, ["0", "1"]),
        "too-wide": ("not started", None, []),
    }
    assert (tmp_path / "out" / "fine" / "stdout.txt").read_text() == "0 0 MODEL\n"
    assert found["wide"]["start_s"] >= max(found[name]["seconds"] for name in ("fine", "broken"))
    table = (tmp_path / "out" / "summary.md").read_text().splitlines()
    assert table[3].startswith("| broken | failed (3) | 1 |") and table[5].startswith(
        "| too-wide | not started | - | - |"
    )
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("behaviour", ["obey", "ignore"])
def test_past_its_limit_all_its_processes_are_ended_and_no_others(
    scripts: dict[str, ModuleType], tmp_path: Path, behaviour: str
) -> None:
    """Also one in a session of its own that ignores SIGTERM. A neighbour with the same command goes on."""
    assert scripts["main"].become_subreaper()
    (tmp_path / "mine").mkdir()
    neighbour = psutil.Popen([sys.executable, "-c", STUBBORN, str(tmp_path / "mine"), "obey"])
    try:
        kept = tmp_path / "child"
        code = STUBBORN.replace("sys.argv[1]", repr(str(tmp_path)), 1)
        begin = time.monotonic()
        found = measure(scripts, tmp_path, made(scripts, "slow", code, behaviour, limit_s=3.0))
        assert time.monotonic() - begin < 20
        assert found["slow"]["status"] == "late" and found["slow"]["exit_code"] == (-15 if behaviour == "obey" else -9)
        assert gone(int(kept.read_text()))
        assert (tmp_path / "out" / "slow" / "stdout.txt").read_text() == "waits\n"
        assert neighbour.is_running() and not gone(neighbour.pid)
    finally:
        for process in [*neighbour.children(recursive=True), neighbour]:
            process.kill()
        neighbour.wait()


def test_what_a_measurement_leaves_behind_is_ended_too(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    assert scripts["main"].become_subreaper()
    code = STUBBORN.replace("sys.argv[1]", repr(str(tmp_path)), 1)
    found = measure(scripts, tmp_path, made(scripts, "untidy", code, "leave"))
    assert (found["untidy"]["status"], found["untidy"]["exit_code"]) == ("ok", 0)
    assert gone(int((tmp_path / "child").read_text()))


def test_the_time_of_all_ends_what_runs(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    sleeper, other = (made(scripts, name, "import time; time.sleep(600)", gpus=2) for name in ("first", "second"))
    found = measure(scripts, tmp_path, sleeper, other, limit_s=40, grace_s=37)
    assert (found["first"]["status"], found["second"]["status"]) == ("out of time", "not started")
    # It obeys at once, so the grace is not waited for.
    assert 2.5 <= found["first"]["seconds"] <= 25


def test_two_that_are_ended_at_once_are_over_at_once(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """The second may be gone before anybody waits for it."""
    sleepers = [made(scripts, name, "import time; time.sleep(600)", limit_s=2.0) for name in ("first", "second")]
    found = measure(scripts, tmp_path, *sleepers, limit_s=200, grace_s=60)
    assert [record["status"] for record in found.values()] == ["late", "late"]
    assert max(record["seconds"] for record in found.values()) < 30


def test_a_run_ends_when_its_goal_is_reached_twice_in_succession(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    until = scripts["plan"].Until("metrics.jsonl", "success", 0.6, times=2)
    found = measure(scripts, tmp_path, made(scripts, "learns", LEARNS, until=until))
    assert found["learns"]["status"] == "reached" and found["learns"]["seconds"] < 30


def test_a_line_that_is_not_whole_is_read_later(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    file = tmp_path / "rows"
    watch = scripts["process"].Watch(file, scripts["plan"].Until("rows", "success", 0.6, times=1))
    assert not watch.reached()
    file.write_text('{"success": 0.')
    assert not watch.reached()
    file.write_text('{"success": 0.9}\n{"success": 0.1}\n')
    # It was reached, though the last row is below.
    assert watch.reached()


def test_an_interrupt_leaves_what_is_done(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    code = "import os, signal, time; time.sleep(1); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    done = made(scripts, "done", "print('figures')")
    # Tests in a shell's background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            measure(
                scripts, tmp_path, done, made(scripts, "breaks", code, gpus=2), made(scripts, "later", code, gpus=2)
            )
    finally:
        signal.signal(signal.SIGINT, before)
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["measurements"]
    assert [record["status"] for record in found] == ["ok", "interrupted", "not started"]


def test_a_full_disk_leaves_nothing_running(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    assert scripts["main"].become_subreaper()
    monkeypatch.setattr(scripts["main"], "collect", full)
    code = "import os, sys, time; from pathlib import Path; Path(sys.argv[2]).write_text(str(os.getpid())); "
    pids = tmp_path / "pid"
    # It ends when the other one has begun.
    ends = "import sys, time\nfrom pathlib import Path\nwhile not Path(sys.argv[2]).exists(): time.sleep(0.05)"
    holds = made(scripts, "holds", code + "time.sleep(600)", str(pids))
    with pytest.raises(OSError, match="No space left"):
        measure(scripts, tmp_path, holds, made(scripts, "ends", ends, str(pids)))
    assert gone(int(pids.read_text()))
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["measurements"]
    assert [record["status"] for record in found] == ["interrupted", "ok"]


def test_folders_that_cannot_be_made_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = Path(__file__).parents[3] / "scripts" / "gpu_measurements.py"
    words = [sys.executable, script, "--device", "cpu", "--gpus", "2", "--only", "levers"]
    for option in ("--output", "--scratch"):
        folders = {"--output": tmp_path / "out", "--scratch": tmp_path} | {option: tmp_path / "file" / "below"}
        pairs = [str(word) for pair in folders.items() for word in pair]
        done = subprocess.run([*words, *pairs], capture_output=True, text=True, timeout=120)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert str(tmp_path / "file") in done.stderr


def test_small_files_are_kept_and_large_ones_said(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    results, work = scripts["results"], tmp_path / "work"
    (work / "run" / "actor_0").mkdir(parents=True)
    rows = [{"time": 100.0, "source": "weight_update"}, {"time": 103.0, "evaluation/test/success_rate": 0.4}]
    rows = [row | {"step": 0} for row in rows]
    rows += [{"time": 110.0, "step": 1, "finetune/step_s": 1.0, "finetune/samples": 50.0, "finetune/ess": 0.9}]
    (work / "run" / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n" + " " * 10_000)
    (work / "run" / "launch.log").write_bytes(os.urandom(100_000))
    (work / "run" / "actor_0" / "stderr.log").write_text("the end")
    (work / "run" / "summary.json").write_bytes(os.urandom(results.KEPT_BYTES))
    record = results.Record("a", "g", "", 2, 1.0, 1.0)
    results.collect(record, "run", work, tmp_path / "out")
    kept = tmp_path / "out" / "a"
    assert record.files == ["run/metrics.jsonl.gz", "run/launch.log.gz", "run/actor_0/stderr.log"]
    assert record.left_out == ["run/summary.json.gz"]
    assert gzip.decompress((kept / "run/metrics.jsonl.gz").read_bytes()) == (work / "run/metrics.jsonl").read_bytes()
    assert len(gzip.decompress((kept / "run/launch.log.gz").read_bytes())) == 30_000
    assert (kept / "stdout.txt").read_bytes() == b""
    assert [line.split(",")[:3] for line in (kept / "curve.csv").read_text().splitlines()] == [
        ["step", "seconds", "evaluation/test/success_rate"],
        ["0", "3.0", "0.4"],
        ["1", "10.0", ""],
    ]
    figures = {
        name: record.figures[name] for name in ("steps", "training s", "samples/s", "s to 0.35", "s to 0.6", "best")
    }
    assert figures == {
        "steps": 1,
        "training s": 10.0,
        "samples/s": 5.0,
        "s to 0.35": 3.0,
        "s to 0.6": None,
        "best": 0.4,
    }
