"""The trainer as its process runs it: real streams and run directory, no servers."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.finetune.assemble import run_trainer
from pipelinerl.records import FateRecord, MetricRecord, TrainerMessage, TrainerStarted, TrainingBatch, TrainingDone
from pipelinerl.role import RoleContext
from pipelinerl.rundir.heartbeat import Heartbeat, read_heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import Job, WorldMap


@pytest.fixture
def start(kit, tmp_path):
    model = tmp_path / "model"
    kit.model().save_pretrained(model)
    kit.tokenizer(model)

    def make(**finetune):
        settings = dict(
            seq_length=128,
            max_train_steps=3,
            num_warmup_steps=0,
            learning_rate=1e-2,
            send_weight_updates=False,
            save_checkpoint_steps=2,
            gradient_checkpointing=False,
        )
        config = RunConfig(output_dir=str(tmp_path / "run"), model_path=str(model), finetune={**settings, **finetune})
        job = Job("finetune", "finetune_0", 0, 0, 0, "localhost", [], None, None, None, 1)
        run_dir = RunDir(tmp_path / "run")
        return RoleContext(
            config=config,
            world=WorldMap([job], "cpu", 1, 0, 1, "127.0.0.1", 1234),
            job=job,
            run_dir=run_dir,
            run_id="run-a",
            incarnation=0,
            token="",
            heartbeat=Heartbeat(run_dir.heartbeat_file("finetune_0"), 0.2),
            streams=StreamHub(config.streams, run_dir, "run-a"),
        )

    return make


def write_batches(kit, context, steps):
    writer = context.streams.writer("training_data", "preprocessor_0", TrainingBatch)
    for step in steps:
        writer.write(kit.batch(kit.samples(8, seed=step), step=step))
    writer.close()


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_sampling_is_checked_unless_it_is_cut(kit, start, monkeypatch, min_tokens):
    context = start()
    parameters = context.config.llm.parameters.model_copy(update={"min_tokens": min_tokens})
    llm = context.config.llm.model_copy(update={"parameters": parameters})
    context = dataclasses.replace(context, config=context.config.model_copy(update={"llm": llm}))
    made = []

    class Loop:
        def __init__(self, **parts):
            made.append(parts)

        def run(self, state):
            return state

    monkeypatch.setattr("pipelinerl.finetune.assemble.TrainingLoop", Loop)
    with context.heartbeat:
        run_trainer(context, {})
    assert [parts["checks_sampling"] for parts in made] == [min_tokens == 0]


def read_all(context, topic, instance, kind):
    return [entry.record for entry in context.streams.reader(topic, instance, kind).read(1.0)]


def test_a_whole_run_leaves_model_state_messages_and_metrics(kit, start, tmp_path):
    context = start()
    write_batches(kit, context, (1, 2, 3))
    with context.heartbeat:
        state = run_trainer(context, {})
    assert (state.step, state.samples_processed, state.data_offset, state.actor_offset) == (3, 24, 3, 30)
    messages = read_all(context, "trainer", "finetune_0", TrainerMessage)
    assert isinstance(messages[0], TrainerStarted) and messages[0].step == 0
    assert [message.step for message in messages[1:-1]] == [1, 2, 3]
    assert isinstance(messages[-1], TrainingDone) and messages[-1].version == 3
    fates = read_all(context, "fates", "finetune_0", FateRecord)
    assert len({sample for fate in fates for sample in fate.sample_ids}) == 8
    metrics = read_all(context, "metrics", "finetune_0", MetricRecord)
    assert [record.values["finetune/samples"] for record in metrics] == [8.0, 8.0, 8.0]
    finetune = tmp_path / "run" / "finetune"
    assert sorted(path.name for path in (finetune / "training_state").iterdir()) == ["2", "3"]
    assert sorted(path.name for path in (finetune / "intermediate").iterdir()) == ["2", "3"]
    assert AutoModelForCausalLM.from_pretrained(finetune / "current").dtype == torch.float32
    # A sign of life behind every step and every micro-batch.
    assert read_heartbeat(context.run_dir.heartbeat_file("finetune_0")).progress >= 2 * 3


def test_a_value_head_is_trained_and_saved_beside_the_model(kit, start, tmp_path):
    context = start(
        model_class="causal-language-modeling-with-value-head",
        rl=dict(advantage_estimator="gae", value_loss_coef=0.5),
        critic_learning_rate=0.1,
        max_train_steps=1,
    )
    write_batches(kit, context, (1,))
    run_trainer(context, {})
    folder = tmp_path / "run" / "finetune" / "current"
    head = load_file(folder / "value_head" / "model.safetensors")
    # Adam's first step moves every weight by its learning rate.
    assert head["bias"].abs().item() == pytest.approx(0.1, rel=1e-3)
    assert not any("value_head" in name for name in load_file(folder / "model.safetensors"))
