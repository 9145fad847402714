"""The heartbeat file: what it says, when, and what a failing disk costs."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from pipelinerl.rundir import heartbeat as heartbeat_module
from pipelinerl.rundir.heartbeat import Heartbeat, HeartbeatState, read_heartbeat


def test_the_file_holds_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X6: durations do not come from the wall clock, which somebody may set."""
    moments = iter([100.0, 101.0, 102.0, 104.5])
    with monkeypatch.context() as clock:
        clock.setattr(heartbeat_module.time, "monotonic", lambda: next(moments))
        clock.setattr(heartbeat_module.time, "time", lambda: 7.0)
        heartbeat = Heartbeat(tmp_path / "job" / "heartbeat.json", 60)
        heartbeat.progress(3)
        with heartbeat.waiting("training data", deadline_s=30):
            heartbeat.beat()
    assert json.loads((tmp_path / "job" / "heartbeat.json").read_text()) == {
        "pid": os.getpid(),
        "time": 7.0,
        "uptime_s": 4.5,
        "progress": 3,
        "idle_s": 3.5,
        "waiting_for": "training data",
        "waited_s": 2.5,
        "deadline_s": 30,
    }
    assert read_heartbeat(tmp_path / "job" / "heartbeat.json") is not None
    assert heartbeat.state().waiting_for is None


def test_the_wait_with_the_first_deadline_is_shown() -> None:
    heartbeat = Heartbeat(Path("unused"), 60)
    with heartbeat.waiting("for ever"):
        assert heartbeat.state().waiting_for == "for ever"
        with heartbeat.waiting("long", deadline_s=100), heartbeat.waiting("short", deadline_s=10):
            assert heartbeat.state().waiting_for == "short"
        with pytest.raises(KeyError), heartbeat.waiting("broken", deadline_s=1):
            raise KeyError
        assert heartbeat.state().waiting_for == "for ever"


def test_overdue() -> None:
    state = HeartbeatState(pid=1, time=0, waiting_for="x", waited_s=3.0, deadline_s=5.0)
    assert [state.overdue_s(age_s) for age_s in (0.0, 2.0, 4.5)] == [0.0, 0.0, 2.5]
    assert HeartbeatState(pid=1, time=0).overdue_s(1e9) == 0.0


def test_the_heartbeat_of_an_older_version_can_be_read(tmp_path: Path) -> None:
    """A run that is continued may have some."""
    (tmp_path / "heartbeat.json").write_text('{"pid": 4, "time": 1.0, "progress": 2, "progress_time": 1.0}')
    assert read_heartbeat(tmp_path / "heartbeat.json") == HeartbeatState(pid=4, time=1.0, progress=2)


def test_it_beats_at_its_interval_until_stopped(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat.json"
    with Heartbeat(file, 0.02) as heartbeat:
        first = read_heartbeat(file)
        assert first is not None
        deadline = time.monotonic() + 60
        while (state := read_heartbeat(file)) is not None and state.uptime_s == first.uptime_s:
            assert time.monotonic() < deadline
        heartbeat.progress()
    last = read_heartbeat(file)
    assert last is not None and last.progress == 1
    heartbeat.stop()
    assert list(tmp_path.iterdir()) == [file]


def test_o1_a_disk_that_refuses_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    heartbeat = Heartbeat(tmp_path / "file" / "heartbeat.json", 60)
    with caplog.at_level(logging.WARNING):
        heartbeat.beat()
        heartbeat.beat()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b"\xff", b"[]"])
def test_a_file_that_is_no_heartbeat_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "heartbeat.json").write_bytes(content)
    assert read_heartbeat(tmp_path / "heartbeat.json") is None
    assert read_heartbeat(tmp_path / "absent.json") is None
