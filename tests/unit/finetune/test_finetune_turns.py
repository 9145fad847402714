"""The loop with schedules that keep out of the way of generation: when it asks, and what it does if asked to stop."""

from __future__ import annotations

import pytest
import torch

from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.checkpoint import CheckpointStore
from pipelinerl.finetune.data_feed import DataFeed
from pipelinerl.finetune.loop import TrainingLoop
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.report import Reporter
from pipelinerl.finetune.state import TrainerState
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.weights_feed import WeightsFeed
from pipelinerl.records import StepDone, TrainingDone
from pipelinerl.tracking.recorder import MetricRecorder

STEPS = 4


class FakeTurns:
    """Notes when it is asked; says no to the update to `refused`, or to training behind step `refused_training`."""

    def __init__(self, log, refused=None, refused_training=None):
        self.log, self.refused, self.refused_training = log, refused, refused_training

    def before_training(self, steps_done):
        self.log.append(f"may train {steps_done + 1}")
        return steps_done != self.refused_training

    def before_update(self, version):
        self.log.append(f"may update {version}")
        return version != self.refused


@pytest.fixture
def run(kit, tmp_path):
    tokenizer = kit.tokenizer(tmp_path / "tokenizer")

    def make(turns, interval=1, reporter=None, **more):
        config = kit.config(max_train_steps=STEPS, weight_update_interval=interval)
        backend = PlainBackend(kit.policy(), config, Ranks())
        store = CheckpointStore(tmp_path / "run" / "training_state", Ranks())
        written = []
        log = kit.writer(written)
        publisher = kit.publisher()
        batches = [kit.batch(kit.samples(8, seed=step), step=step) for step in range(1, STEPS + 1)]
        loop = TrainingLoop(
            config=config,
            backend=backend,
            feed=DataFeed(kit.reader(batches), kit.heartbeat(), 1.0),
            steps=StepRunner(backend, config, Ranks(), schedule_of(config)),
            weights=WeightsFeed(backend, Ranks(), publisher, torch.float32),
            checkpoints=store,
            exporter=ModelExporter(tmp_path / "run", str(tokenizer), Ranks()),
            reporter=reporter or Reporter(log, log, MetricRecorder(kit.writer(), "finetune_0"), 0, clock=lambda: 5.0),
            heartbeat=kit.heartbeat(),
            export_dtype=torch.float32,
            first_probe_tokens=[],
            pauses=turns,
            **more,
        )
        state = loop.run(TrainerState())
        return state, publisher, written, store

    return make


def test_it_asks_before_each_step_and_before_each_update_but_the_first(run):
    log: list[str] = []
    state, publisher, written, _ = run(FakeTurns(log), interval=2)
    assert state.step == STEPS and publisher.versions == [0, 2, 4]
    assert log == ["may train 1", "may train 2", "may update 2", "may train 3", "may train 4", "may update 4"]
    assert isinstance(written[-1], TrainingDone)


@pytest.mark.parametrize("refused", [2, STEPS])
def test_a_stop_while_rollouts_end_keeps_the_step_and_sends_nothing(run, kit, refused):
    """Also at the last step: without its weights in the servers training is not complete."""
    state, publisher, written, store = run(FakeTurns([], refused=refused))
    assert state.step == refused
    assert publisher.versions == list(range(refused))
    assert [record.step for record in written if isinstance(record, StepDone)] == list(range(1, refused + 1))
    assert not any(isinstance(record, TrainingDone) for record in written)
    saved = store.restore(PlainBackend(kit.policy(), kit.config(), Ranks()))
    assert saved is not None and saved.step == refused


def test_a_stop_while_devices_change_hands_leaves_the_batch_for_the_next_start(run, kit):
    state, publisher, _, store = run(FakeTurns([], refused_training=2))
    assert (state.step, state.data_offset) == (2, 2) and publisher.versions == [0, 1, 2]
    saved = store.restore(PlainBackend(kit.policy(), kit.config(), Ranks()))
    assert saved is not None and (saved.step, saved.data_offset) == (2, 2)


class SlowTurns(FakeTurns):
    """Changing turns takes 3 s before training and 2 s before an update, on a clock that stands still otherwise."""

    now = 0.0

    def before_training(self, steps_done):
        self.now += 3.0
        return super().before_training(steps_done)

    def before_update(self, version):
        self.now += 2.0
        return super().before_update(version)


def test_the_time_of_changing_turns_is_told_apart(run, kit):
    turns, metrics = SlowTurns([]), []
    writer = MetricRecorder(kit.writer(metrics), "finetune_0")
    log = kit.writer([])
    reporter = Reporter(log, log, writer, 0, clock=lambda: 5.0)
    run(turns, interval=2, reporter=reporter, clock=lambda: turns.now)
    names = ("wait_data_s", "switch_s", "train_s", "weight_update_s", "step_s", "idle_s")
    found = [tuple(record.values[f"finetune/{name}"] for name in names) for record in metrics]
    # An update follows every second step only.
    assert found == [(0, 3, 0, 0, 3, 3), (0, 5, 0, 0, 5, 5)] * 2
