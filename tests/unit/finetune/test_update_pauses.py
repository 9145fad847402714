"""What the trainer does around updates unless `schedule=pipeline`: rollouts pause, devices change hands."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import FileStreams
from pipelinerl.errors import WorkerError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.pauses import PausedUpdates, RolloutPause, SharedDevices, sleep_level
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.records import PauseRequest, RolloutsPaused
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub

GIB = 2**30


@pytest.mark.parametrize(
    ("choice", "weight_gib", "free_gib", "level"),
    [("auto", 4, 8, 1), ("auto", 5, 8, 2), ("1", 5, 8, 1), ("2", 1, 8, 2)],
)
def test_weights_go_to_host_memory_where_they_fit(choice: str, weight_gib: int, free_gib: int, level: int) -> None:
    assert sleep_level(choice, weight_gib * GIB, free_gib * GIB) == level


def test_moving_the_optimizer_changes_no_step(kit):
    """Two trainers take the same steps; the state of one travels between them."""
    config = kit.config()
    results = []
    for travels in (False, True):
        backend = PlainBackend(kit.policy(), config, Ranks())
        steps = StepRunner(backend, config, Ranks())
        for step in (1, 2, 3):
            if travels:
                backend.move_optimizer(torch.device("cpu"))
            steps.run(kit.batch(kit.samples(8, seed=step), step=step))
        results.append([parameter.detach().clone() for parameter in backend.policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_state_is_where_it_was_moved_to(kit):
    backend = PlainBackend(kit.policy(), kit.config(), Ranks())
    backend.move_optimizer(torch.device("meta"))
    StepRunner(backend, kit.config(), Ranks()).run(kit.batch(kit.samples(8)))
    backend.move_optimizer(torch.device("meta"))
    states = list(backend.optimizer.state.values())
    assert states
    assert {state[key].device.type for state in states for key in ("exp_avg", "exp_avg_sq")} == {"meta"}


class FakeServers:
    def __init__(self, log):
        self.log, self.servers = log, ["actor_llm_0"]

    def sleep(self, level):
        self.log.append(f"sleep at level {level}")


@dataclass(frozen=True)
class LoggingRanks(Ranks):
    log: list[str] = field(default_factory=list)

    def barrier(self):
        self.log.append("all ranks are here")


def test_on_a_cpu_servers_pause_once_in_a_round(kit):
    config = RunConfig(
        output_dir="x",
        schedule="conventional",
        steps_per_generation=2,
        world={"placement": "colocated", "device": "cpu"},
        finetune=kit.config(max_train_steps=3),
    )
    log: list[str] = []
    pause = SimpleNamespace(wait=lambda version: log.append(f"pause for {version}") or True)
    backend = PlainBackend(kit.policy(), config.finetune, Ranks())
    turns = SharedDevices(config, pause, LoggingRanks(log=log), backend, FakeServers(log))
    for step in (1, 2, 3):
        assert turns.before_training(step - 1)
        log.append(f"step {step}")
        if step in (2, 3):
            assert turns.before_update(step)
    # Behind the last step of a round no rank goes on before all have left the devices: the servers wake then.
    end_of_round = "all ranks are here"
    first = ["pause for 2", "sleep at level 0", "step 1", "step 2", end_of_round]
    assert log == [*first, "pause for 3", "sleep at level 0", "step 3", end_of_round]


def test_devices_stay_with_the_servers_if_the_trainer_is_asked_to_stop(kit):
    log: list[str] = []
    pause = SimpleNamespace(wait=lambda version: log.append(f"pause for {version}") or False)
    config = RunConfig(output_dir="x", schedule="conventional", world={"placement": "colocated", "device": "cpu"})
    turns = SharedDevices(config, pause, LoggingRanks(log=log), None, FakeServers(log))
    assert not turns.before_training(0) and turns.before_update(0)
    assert log == ["pause for 1"]


def test_updates_are_paused_for_on_the_first_rank_and_agreed_on_by_all():
    log: list[int] = []
    first = PausedUpdates(SimpleNamespace(wait=lambda version: log.append(version) or True), Ranks())
    assert first.before_training(0) and first.before_update(3) and log == [3]
    other = PausedUpdates(None, SimpleNamespace(broadcast=lambda own: 0))
    assert not other.before_update(3), "the first rank was asked to stop"


@pytest.fixture
def make_pause(kit, tmp_path):
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run-a")
    requests, answers = hub.writer("turns", "finetune_0", PauseRequest), hub.reader("turns", "actor_0", RolloutsPaused)
    yield lambda **options: RolloutPause(requests, answers, 1, kit.heartbeat(), **options)
    requests.close()
    answers.close()


def test_rollouts_that_never_end_are_an_error_with_the_version(make_pause):
    with pytest.raises(WorkerError, match=r"version 5 \(actor.rollout_timeout_s\)"):
        make_pause(timeout_s=0.0).wait(5)


def test_a_stop_ends_the_wait(make_pause):
    asked, stop, results = threading.Event(), threading.Event(), []

    def should_stop() -> bool:
        asked.set()
        return stop.is_set()

    pause = make_pause(timeout_s=60.0, should_stop=should_stop)
    thread = threading.Thread(target=lambda: results.append(pause.wait(5)))
    thread.start()
    assert asked.wait(60)
    stop.set()
    pause.wake()
    thread.join(60)
    assert results == [False]
