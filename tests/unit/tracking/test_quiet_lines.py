"""What plain output says when nothing happened for a while, and that it says it."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path
from typing import Any

import msgspec
from fakes.short_sample import evaluation_result, step_done

from pipelinerl.config import RunConfig
from pipelinerl.records import MetricRecord, TrainingDone, WeightUpdateSuccess
from pipelinerl.rundir.heartbeat import HeartbeatState
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tracking.collector import Collector
from pipelinerl.tracking.display import PlainDisplay, quiet_line, read_beats
from pipelinerl.tracking.state import RunState
from pipelinerl.world import Job, WorldMap

CONFIG = RunConfig.model_validate(
    {"output_dir": "x", "test_dataset_names": ["test"], "finetune": {"max_train_steps": 52}, "attempts": 8}
)
JOBS = [Job(kind, f"{kind}_0", 0, 0, 0, "h", [], None, None, None, 1) for kind in ("actor_llm", "actor", "finetune")]


def beat(waiting_for: str | None = None, waited_s: float = 25.0) -> HeartbeatState:
    return HeartbeatState(pid=1, time=0, waiting_for=waiting_for, waited_s=waited_s if waiting_for else None)


def line(state: RunState, beats: dict[str, HeartbeatState | None]) -> str:
    return quiet_line(state, CONFIG, beats, run_s=30.0)


def test_a_continued_run_is_not_what_its_last_start_was() -> None:
    state = RunState(incarnation=1)
    told = []
    for start in (0, 1):
        told.append(line(state, {}))
        state.fold_trainer(WeightUpdateSuccess(version=0, time=40.0, seconds={}, num_servers=1, incarnation=start))
        told.append(line(state, {}))
        state.fold_trainer(TrainingDone(version=2, time=130.0, samples_processed=40, incarnation=start))
    told.append(line(state, {}))
    assert [text.split()[0].strip(",") for text in told] == ["starting", "starting", "starting", "step", "training"]


def test_it_names_the_step_the_samples_and_who_waits() -> None:
    beats = {"actor_llm_0": beat(), "preprocessor_0": None, "actor_0": beat("x", 4.0), "finetune_0": beat("y")}
    text = line(RunState(), beats)
    assert "30 s" in text and "preprocessor_0" in text and "finetune_0 waits for y (25 s)" in text
    assert "actor_0" not in text, "a wait of 4 s is not worth a word"
    state = RunState()
    state.fold_evaluation(evaluation_result(time=50.0))
    state.fold_trainer(WeightUpdateSuccess(version=12, time=40.0, seconds={"total": 0.3}, num_servers=2))
    state.fold_trainer(step_done(12, 60.0))
    values = {
        "actor/admitted_samples": 400.0,
        "actor/in_flight_samples": 88.0,
        "actor/rollouts_per_s": 41.26,
        "actor/server_busy_0": 60.0,
        "actor/server_busy_1": 4.0,
        "actor/failed_rollouts": 3.0,
    }
    state.fold_metrics(MetricRecord(source="actor_0", step=12, time=60.0, values=values))
    text = line(state, {"finetune_0": beat()})
    for part in (
        "step 13/52",
        f"312 of {CONFIG.finetune.samples_per_step}",
        "41.3 rollouts/s",
        "64 running",
        "3 failed",
    ):
        assert part in text
    state.fold_trainer(TrainingDone(version=52, time=99.0, samples_processed=8))
    assert "13/52" not in line(state, {"actor_0": beat()})


def test_heartbeats_of_all_processes_are_read(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    files.job("actor_0").mkdir()
    files.heartbeat_file("actor_0").write_bytes(msgspec.json.encode(beat("x")))
    assert read_beats(files, JOBS) == {"actor_llm_0": None, "actor_0": beat("x"), "finetune_0": None}


class Screen(io.StringIO):
    """Tells when a line was written that holds `word`."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.seen = word, threading.Event()

    def write(self, text: str) -> int:
        size = super().write(text)
        if self.word in text:
            self.seen.set()
        return size


def snapshot(read: Any) -> Any:
    return read(RunState())


def test_plain_output_says_what_is_waited_for_when_there_is_no_news() -> None:
    screen = Screen("waits")
    display = PlainDisplay(screen, 40, describe=lambda state: f"step {state.steps} waits", quiet_interval_s=0.01)
    display.start(snapshot)
    assert screen.seen.wait(60)
    display.stop()
    shown = screen.getvalue()
    assert set(shown.splitlines()) == {"step 0 waits"}
    display.stop()
    assert screen.getvalue() == shown


def test_plain_output_is_silent_while_there_is_news() -> None:
    """With an interval that no test reaches, whatever comes is all that is shown, and `stop` ends the wait."""
    screen = Screen("news")
    display = PlainDisplay(screen, 40, describe=lambda state: "quiet", quiet_interval_s=3600)
    display.start(snapshot)
    display.notice("news")
    display.stop()
    assert screen.getvalue() == "news\n"


def test_a_terminal_that_was_closed_ends_the_lines_alone() -> None:
    screen = Screen("x")
    screen.close()
    display = PlainDisplay(screen, 40, describe=lambda state: "quiet", quiet_interval_s=0.01)
    display.start(snapshot)
    assert display._thread is not None
    display._thread.join(60)
    assert not display._thread.is_alive()
    display.stop()


def test_workers_that_user_code_held_are_said_once(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    hub = StreamHub(CONFIG.streams, files, "r")
    config = RunConfig(output_dir=str(tmp_path), wandb={"mode": "disabled"})
    screen = io.StringIO()
    world, display = WorldMap(JOBS, "cpu", 1, "h", 1), PlainDisplay(screen, 1)
    collector = Collector(hub, world, files, config, display=display, incarnation=1)
    with contextlib.closing(hub.writer("metrics", "actor_0", MetricRecord)) as writer:
        for time, count in ((5.0, 7.0), (9e9, 0.0), (9e9, 1.0), (9e9, 1.0), (9e9, 3.0)):
            values = {"actor/replaced_workers": count}
            writer.write(MetricRecord(source="actor_0", step=1, time=time, values=values))
    collector.start()
    collector.stop()
    lines = screen.getvalue().splitlines()
    assert [line.partition("(")[2][:8] for line in lines] == ["1 so far", "3 so far"]
    assert str(tmp_path / "actor_0" / "stderr.log") in lines[0]
