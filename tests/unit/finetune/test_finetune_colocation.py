"""A trainer that shares its devices: level of sleep, optimizer state, and who leaves when."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.colocation import level_of, sleep_level, take_turns
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

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
        steps = StepRunner(backend, config, Ranks(), schedule_of(config))
        for step in (1, 2, 3):
            if travels:
                backend.move_optimizer(torch.device("cpu"))
            steps.run(kit.batch(kit.samples(8, seed=step), step=step))
        results.append([parameter.detach().clone() for parameter in backend.policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_state_is_where_it_was_moved_to(kit):
    backend = PlainBackend(kit.policy(), kit.config(), Ranks())
    backend.move_optimizer(torch.device("meta"))
    StepRunner(backend, kit.config(), Ranks(), schedule_of(kit.config())).run(kit.batch(kit.samples(8)))
    backend.move_optimizer(torch.device("meta"))
    states = list(backend._optimizer.state.values())
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
    drain = SimpleNamespace(wait=lambda version: log.append(f"drain for {version}") or True)
    backend = PlainBackend(kit.policy(), config.finetune, Ranks())
    turns = take_turns(
        SimpleNamespace(config=config),
        LoggingRanks(log=log),
        backend,
        drain,
        FakeServers(log),
        agree=lambda answer: answer,
    )
    for step in (1, 2, 3):
        assert turns.before_training(step - 1)
        log.append(f"step {step}")
        if step in (2, 3):
            assert turns.before_update(step)
    # Behind the last step of a round no rank goes on before all have left the devices: the servers wake then.
    end_of_round = "all ranks are here"
    first = ["drain for 2", "sleep at level 0", "step 1", "step 2", end_of_round]
    assert log == [*first, "drain for 3", "sleep at level 0", "step 3", end_of_round]
    assert level_of(config, backend, 1) == 1
