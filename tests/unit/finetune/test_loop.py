"""The whole loop in one process with a fake server: order of messages, versions, probes, export, resume, stop."""

import os
import signal
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipelinerl.config.resources import FileStreams
from pipelinerl.config.task import LLMParameters
from pipelinerl.errors import StreamError, UserError, WeightSyncError, WorkerError
from pipelinerl.finetune.checkpoint import CheckpointStore
from pipelinerl.finetune.data_feed import DataFeed, StopRequest, stop_on_sigterm
from pipelinerl.finetune.loop import check_on_policy, run_trainer, samples_everything
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import (
    FateRecord,
    MetricRecord,
    StepDone,
    StepEnding,
    TokenRatios,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
    VersionSpan,
    WeightUpdateSuccess,
)
from pipelinerl.rundir.heartbeat import read_heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.files import FileBackend
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all


def assert_same_weights(one, other):
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


def test_messages_come_in_order_and_the_final_model_is_the_one_that_was_sent(start):
    run = start().go()
    kinds = [type(record) for record in run.written]
    step = [StepEnding, WeightUpdateSuccess, FateRecord, FateRecord, FateRecord, StepDone]
    assert kinds == [TrainerStarted, WeightUpdateSuccess, *step * 4, TrainingDone]
    assert run.written[0] == TrainerStarted(step=0, data_offset=0, time=5.0)
    assert run.publisher.versions == [0, 1, 2, 3, 4]
    updates = [record for record in run.written if isinstance(record, WeightUpdateSuccess)]
    assert [update.probe_abs_diff is not None for update in updates] == [True, True, False, False, True]
    assert all(update.probe_abs_diff < 1e-5 for update in updates if update.probe_abs_diff is not None)
    assert updates[0].seconds["pause"] == 0.01 and updates[0].num_servers == 1
    fates = [record for record in run.written if isinstance(record, FateRecord)]
    assert sum(len(fate.sample_ids) for fate in fates) == 48
    assert {(fate.fate, fate.source) for fate in fates} == {("trained", "finetune_0")}
    assert [fate.version for fate in fates] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert run.written[-1] == TrainingDone(version=4, time=5.0, samples_processed=48)
    saved = AutoModelForCausalLM.from_pretrained(run.root / "current").state_dict()
    for name, tensor in run.policy.language_model.state_dict().items():
        assert torch.equal(saved[name], tensor), name
    assert (run.root / "current" / "tokenizer.json").exists()


def test_importance_ratios_of_every_trained_token_are_recorded(start, batches, kit):
    run = start(record_token_ratios=True).go()
    records = list(read_all(run.context.streams, "token_ratios", "finetune_0", TokenRatios))
    assert [record.step for record in records] == [1, 2, 3, 4]
    samples = {sample.id: sample for sample in batches[0].samples}
    assert sorted(records[0].sample_ids) == sorted(samples)
    found = torch.frombuffer(bytearray(records[0].log_ratios.data), dtype=torch.float16).float()
    parts = dict(zip(records[0].sample_ids, found.split(records[0].lengths), strict=True))
    model = kit.model()
    for name, sample in samples.items():
        ids = torch.tensor(sample.input_ids)
        with torch.no_grad():
            logits = model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        trained = torch.tensor(sample.labels[1:]) != -100
        assert torch.allclose(parts[name], logprobs[trained] - torch.tensor(sample.logprobs), atol=5e-3), name


@pytest.mark.parametrize(
    ("keys", "is_recorded"),
    [
        ({}, True),
        ({"record_token_ratios": False}, False),
        ({"streams": {"retention": "heads"}}, False),
        ({"streams": {"backend": "users.files"}}, True),
    ],
)
def test_importance_ratios_that_nobody_wants_are_no_stream(start, keys, is_recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "users.files", SimpleNamespace(Streams=FileBackend))
    run = start(max_train_steps=1, **{"record_token_ratios": True, **keys}).go()
    assert (run.context.run_dir.streams / "token_ratios").exists() == is_recorded


def test_a_stream_that_refuses_importance_ratios_ends_their_recording_alone(start, caplog):
    trainer = start(record_token_ratios=True)
    trainer.ratios._writer.close()
    refused = [Mock(side_effect=StreamError(text)) for text in ("disk full", "not flushed")]
    trainer.ratios._writer = SimpleNamespace(write=refused[0], close=refused[1])
    assert trainer.go().state.step == 4
    trainer.ratios.close()
    for text in ("disk full", "not flushed"):
        assert sum(text in record.getMessage() for record in caplog.records) == 1


def test_importance_ratios_whose_stream_cannot_be_opened_are_not_recorded(start, caplog, tmp_path):
    streams = tmp_path / "run" / "streams"
    streams.mkdir(parents=True)
    (streams / "token_ratios").touch()
    trainer = start(record_token_ratios=True)
    assert trainer.ratios is None and trainer.go().state.step == 4
    assert sum("importance ratios" in record.getMessage() for record in caplog.records) == 1


def test_metrics_of_a_step(start, batches):
    run = start().go()
    values = [record.values for record in run.metrics]
    assert [record.step for record in run.metrics] == [1, 2, 3, 4]
    wanted = """loss ess ess_after_clamp grad_norm learning_rate reward_mean lag_mean_versions lag_max_versions
        multi_version_samples samples tokens output_tokens step_s wait_data_s train_s weight_update_s idle_s
        samples_per_s logprob_abs_diff_mean kl_sampler_trainer"""
    assert {f"finetune/{name}" for name in wanted.split()} <= values[0].keys()
    samples = batches[3].samples
    assert values[3]["finetune/samples"] == 12
    assert values[3]["finetune/tokens"] == sum(len(sample.input_ids) for sample in samples)
    assert values[3]["finetune/output_tokens"] == sum(sample.output_tokens for sample in samples)
    # Step 4 trains against version 3; tokens of version 0 lag by 3, of version 1 by 2.
    assert values[3]["finetune/lag_max_versions"] == 3
    assert 2 < values[3]["finetune/lag_mean_versions"] < 3
    assert values[3]["finetune/multi_version_samples"] == sum(len(sample.version_spans) == 2 for sample in samples)
    zeros = sum(not sample.advantage for sample in batches[3].samples)
    assert values[3]["finetune/zero_advantage_fraction"] == zeros / 12
    # Linear decay of 0.01 over 4 steps: 1, 3/4, 2/4, 1/4.
    assert [round(v["finetune/learning_rate"], 6) for v in values] == [0.01, 0.0075, 0.005, 0.0025]


def probed(run):
    return [
        record.version
        for record in run.written
        if isinstance(record, WeightUpdateSuccess) and record.probe_abs_diff is not None
    ]


@pytest.mark.parametrize(
    ("every", "interval", "versions"),
    [(0, 1, [0, 1, 4]), (1, 1, [0, 1, 2, 3, 4]), (3, 1, [0, 1, 3, 4]), (1, 2, [0, 2, 4]), (0, 3, [0, 3, 4])],
)
def test_probes_follow_the_updates_that_are_asked_for(start, every, interval, versions):
    run = start(weight_update_interval=interval, supervise=dict(probe_every_n_updates=every)).go()
    assert probed(run) == versions
    assert run.publisher.versions == [*range(0, 5, interval), *([4] if interval == 3 else [])]


def in_passes(batches, *epochs_done):
    return [replace(batch, epochs_done=done) for batch, done in zip(batches, epochs_done, strict=True)]


@pytest.mark.parametrize(
    ("epochs", "interval", "versions"), [(1, 1, [0, 1, 2, 3]), (1, 2, [0, 2, 4]), (2, 1, [0, 1, 2, 3, 4])]
)
def test_passes_end_training_completely(start, batches, epochs, interval, versions):
    """The batch of step 3 has the last group of the first pass; what is not sent yet then waits for the next update."""
    marked = in_passes(batches, 0.5, 0.9, 1.0, 1.2)
    run = start(batches=marked, max_epochs=epochs, weight_update_interval=interval).go()
    assert run.publisher.versions == versions
    assert isinstance(run.written[-1], TrainingDone) and run.written[-1].version == versions[-1]
    assert run.state.is_complete(run.config, interval)
    assert run.metrics[0].values["finetune/epochs_done"] == 0.5


def test_a_run_that_passes_ended_trains_on_only_for_more_passes(start, batches):
    marked = in_passes(batches, 0.5, 1.0, 1.5, 2.0)
    assert start("run", batches=marked, max_epochs=1).go().state.step == 2
    again = start("run", batches=marked, max_epochs=1).go()
    assert again.state.step == 2 and again.publisher.versions == [2]
    # What was recorded after the end is trained then, and does not end it at once.
    assert start("run", batches=marked, max_epochs=2).go().publisher.versions == [2, 3, 4]


class Passes:
    def __init__(self, last):
        self.last = last

    def is_after(self, step):
        return step == self.last


@pytest.mark.parametrize(("last", "interval", "versions"), [(3, 2, [0, 2, 3]), (2, 2, [0, 2]), (0, 1, [0])])
def test_training_is_complete_where_the_passes_leave_nothing_to_train(start, batches, last, interval, versions):
    run = start(batches=batches[:last], max_epochs=1, weight_update_interval=interval)
    run.feed._passes = Passes(last)
    run.go()
    assert run.publisher.versions == versions
    assert isinstance(run.written[-1], TrainingDone) and run.written[-1].version == last
    assert run.state.is_complete(run.config, interval)
    assert not run.checkpoints.restore(run.backend).is_over, "with more passes it trains on"


def test_also_save_steps_save_between_the_regular_steps(start):
    run = start(save_checkpoint_steps=3, also_save_steps=[1]).go()
    for kind in ("training_state", "intermediate"):
        assert sorted(path.name for path in (run.root / kind).iterdir()) == ["1", "3", "4"]


@pytest.mark.parametrize(("minutes", "saved"), [(2.5, ["3", "4"]), (60.0, ["4"]), (0.5, ["1", "2", "3", "4"])])
def test_checkpoints_by_minutes_count_from_the_last_one(start, monkeypatch, minutes, saved):
    """A minute for each step: the clock is asked when training starts, after each step, and once more after a save."""
    run = start(save_checkpoint_steps=100, save_checkpoint_minutes=minutes, keep_last_checkpoints=None)
    monkeypatch.setattr("pipelinerl.finetune.loop.monotonic", lambda: 60.0 * run.state.step)
    run.go()
    assert sorted(path.name for path in (run.root / "training_state").iterdir()) == saved


@pytest.mark.parametrize(("interval", "versions"), [(1, [0, 1]), (3, [0, 1])])
def test_a_reached_target_ends_training_with_its_weights_sent(start, interval, versions):
    run = start(weight_update_interval=interval)
    run.feed._target = SimpleNamespace(is_reached=lambda step: step >= 1)
    run.go()
    assert run.publisher.versions == versions
    assert isinstance(run.written[-1], TrainingDone) and run.written[-1].version == 1
    assert run.state.is_complete(run.config, interval)


def test_d1_the_entropy_bonus_continues_where_it_stood(start):
    rl = {"target_entropy": 9.0, "entropy_bonus": 0.01, "entropy_bonus_step": 0.02}
    whole = start("whole", rl=rl).go()
    start("cut", rl=rl, interrupt_train_steps=2).go()
    resumed = start("cut", rl=rl).go()

    def bonuses(run):
        return [record.values["rl/entropy_bonus"] for record in run.metrics]

    # The entropy of 50 words is below 3.92 nats, so the bonus grows with every step.
    assert bonuses(whole) == pytest.approx([0.01, 0.03, 0.05, 0.07])
    assert bonuses(resumed) == pytest.approx([0.05, 0.07])
    assert_same_weights(whole, resumed)
    # It is part of the loss: without it the weights are others.
    plain = start("plain").go()
    assert not all(torch.equal(tensor, plain.tensors()[name]) for name, tensor in whole.tensors().items())


def test_d1_l7_resume_takes_the_same_steps_bit_by_bit(start, batches):
    """Batches after the checkpoint are trained again as they are; they need nobody else to come back."""
    whole = start("whole").go()
    start("cut", interrupt_train_steps=2).go()
    resumed = start("cut", incarnation=1)
    assert (resumed.state.step, resumed.state.data_offset, resumed.state.samples_processed) == (2, 2, 24)
    assert resumed.state.actor_offset == 20
    resumed.go()
    assert resumed.written[0] == TrainerStarted(step=2, data_offset=2, time=5.0, incarnation=1)
    # The server starts with what the checkpoint holds, before any further step.
    assert resumed.publisher.versions == [2, 3, 4]
    assert_same_weights(whole, resumed)
    trained = [name for record in resumed.written if isinstance(record, FateRecord) for name in record.sample_ids]
    assert trained == [sample.id for batch in batches[2:] for sample in batch.samples]
    assert resumed.written[-1].samples_processed == 48


def test_a_request_to_stop_saves_the_present_step(start, monkeypatch):
    whole = start("whole").go()
    run = start("cut")
    monkeypatch.setattr(StopRequest, "agreed", lambda _: run.state.step >= 3)
    run.go()
    assert run.state.step == 3 and not isinstance(run.written[-1], TrainingDone)
    monkeypatch.undo()
    resumed = start("cut", incarnation=1)
    assert (resumed.state.step, resumed.state.data_offset) == (3, 3)
    assert_same_weights(whole, resumed.go())


def test_sigterm_ends_the_wait_for_data(tmp_path, kit):
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run")
    reader = hub.reader("training_data", "preprocessor_0", TrainingBatch)
    request = StopRequest(Ranks())
    feed = DataFeed(reader, kit.heartbeat(), 60.0, Ranks(), request)
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(request, reader.wake):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert feed.next(1, lambda _: None) is None
        assert request.agreed()
    assert signal.getsignal(signal.SIGTERM) is before


class FakeTurns:
    """Notes when it is asked; refuses the update to `refused`, or training after step `refused_training`."""

    def __init__(self, refused=None, refused_training=None):
        self.log, self.refused, self.refused_training = [], refused, refused_training

    def before_training(self, steps_done):
        self.log.append(f"may train {steps_done + 1}")
        return steps_done != self.refused_training

    def before_update(self, version):
        self.log.append(f"may update {version}")
        return version != self.refused


def with_turns(run, turns):
    run.pauses = turns
    return run.go()


def test_it_asks_before_each_step_and_before_each_update_but_the_first(start):
    turns = FakeTurns()
    run = with_turns(start(weight_update_interval=2), turns)
    assert run.state.step == 4 and run.publisher.versions == [0, 2, 4]
    assert turns.log == ["may train 1", "may train 2", "may update 2", "may train 3", "may train 4", "may update 4"]
    assert isinstance(run.written[-1], TrainingDone)


@pytest.mark.parametrize("refused", [2, 4])
def test_a_stop_while_rollouts_end_keeps_the_step_and_sends_nothing(start, refused):
    """Also at the last step: without its weights in the servers training is not complete."""
    run = with_turns(start(), FakeTurns(refused=refused))
    assert run.state.step == refused and run.publisher.versions == list(range(refused))
    assert [record.step for record in run.written if isinstance(record, StepDone)] == list(range(1, refused + 1))
    assert not any(isinstance(record, TrainingDone) for record in run.written)
    assert run.checkpoints.restore(run.backend).step == refused


def test_a_stop_while_devices_change_hands_leaves_the_batch_for_the_next_start(start):
    run = with_turns(start(), FakeTurns(refused_training=2))
    assert (run.state.step, run.state.data_offset) == (2, 2) and run.publisher.versions == [0, 1, 2]
    saved = run.checkpoints.restore(run.backend)
    assert (saved.step, saved.data_offset) == (2, 2)


def test_the_time_of_changing_turns_is_told_apart(start, monkeypatch):
    """3 s before training and 2 s before an update, on a clock that stands still otherwise."""

    class SlowTurns(FakeTurns):
        now = 0.0

        def before_training(self, steps_done):
            self.now += 3.0
            return super().before_training(steps_done)

        def before_update(self, version):
            self.now += 2.0
            return super().before_update(version)

    turns = SlowTurns()
    monkeypatch.setattr("pipelinerl.finetune.loop.perf_counter", lambda: turns.now)
    run = with_turns(start(weight_update_interval=2), turns)
    names = ("wait_data_s", "switch_s", "train_s", "weight_update_s", "step_s", "idle_s")
    found = [tuple(record.values[f"finetune/{name}"] for name in names) for record in run.metrics]
    # An update follows every second step only.
    assert found == [(0, 3, 0, 0, 3, 3), (0, 5, 0, 0, 5, 5)] * 2


def test_w1_a_server_that_keeps_its_old_head_fails_the_run_after_the_first_update(start, kit):
    run = start(publisher=kit.publisher(stale_head=True))
    with pytest.raises(WeightSyncError, match="actor_llm_0"):
        run.go()
    assert run.publisher.versions == [0, 1]
    assert not any(isinstance(record, StepDone) for record in run.written)


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_server_that_samples_wrongly_under_load_ends_the_run_before_the_next_update(start, kit, min_tokens):
    """Every probe is right; the log-probs of what it sampled are not those of its weights. `min_tokens` cuts the
    distribution, so that nothing can be said."""
    samples = [
        replace(sample, version_spans=[VersionSpan(0, 0, len(sample.logprobs))]) for sample in kit.samples(128, seed=1)
    ]
    llm = dict(parameters=dict(min_tokens=min_tokens))
    run = start(batches=[kit.batch(samples)], interrupt_train_steps=1, llm=llm)
    if min_tokens:
        assert run.go().publisher.versions == [0, 1]
        return
    with pytest.raises(WeightSyncError, match="actor servers"):
        run.go()
    assert run.publisher.versions == [0]
    assert not any(isinstance(record, StepDone | FateRecord) for record in run.written)


@pytest.mark.parametrize("difference", [0.5, 0.51, float("nan"), float("inf")])
def test_the_gap_on_policy_is_bounded(difference):
    few, many = ({"rl/on_policy_tokens": tokens, "rl/logprob_abs_diff_on_policy": difference} for tokens in (255, 8340))
    check_on_policy(few, 1)
    check_on_policy({}, 1)
    if difference == 0.5:
        check_on_policy(many, 7)
    else:
        with pytest.raises(WeightSyncError, match="step 7"):
            check_on_policy(many, 7)


def test_ends_that_are_kept_out_are_no_fault_of_a_server():
    assert samples_everything(LLMParameters(temperature=0.6, stop=["x"], ignore_eos=True))
    assert not samples_everything(LLMParameters(min_tokens=2))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loss_that_is_not_finite_changes_nothing_and_blames_no_server(start, kit, where):
    run = start(batches=[kit.batch(kit.samples(128, seed=1))], interrupt_train_steps=1)
    before, original = run.tensors(), getattr(run.backend, where)

    def broken(*args, **options):
        if where == "backward":
            return original(args[0] * float("nan"), **options)
        outputs = original(*args, **options)
        # The probe's forward pass has no `is_last`.
        return outputs._replace(logprobs=outputs.logprobs * float("nan")) if options else outputs

    setattr(run.backend, where, broken)
    run.go()
    assert all(torch.equal(before[name], tensor) for name, tensor in run.tensors().items())
    assert "finetune/grad_norm" not in run.metrics[0].values


def test_l1_a_server_that_cannot_be_updated_ends_the_run_with_its_error(start, kit):
    with pytest.raises(WeightSyncError, match=r"actor_llm_0.*HTTP 500 boom"):
        start(publisher=kit.publisher(fail="HTTP 500 boom")).go()


def test_batches_that_are_missing_or_out_of_order_end_the_run(start, batches):
    with pytest.raises(WorkerError, match="training data"):
        start(batches=batches[:1], supervise=dict(progress_timeout_s=0.1)).go()
    with pytest.raises(StreamError, match="offset 1"):
        start("other", batches=[batches[0], batches[2]]).go()


def test_d2_a_damaged_training_state_is_refused(start):
    run = start(interrupt_train_steps=2).go()
    file = max((run.root / "training_state" / "2").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="training state"):
        start()


def test_a_whole_run_leaves_model_state_messages_and_metrics(kit, role, tmp_path):
    """As its process runs it: real streams and run directory, no servers."""
    context = role(max_train_steps=3, debug={"mode": "open_loop"}, save_checkpoint_steps=2)

    def read(topic, kind):
        return [entry.record for entry in context.streams.reader(topic, "finetune_0", kind).read(1.0)]

    write_batches(kit, context, (1, 2, 3))
    with context.heartbeat:
        state = run_trainer(context, {})
    assert (state.step, state.samples_processed, state.data_offset, state.actor_offset) == (3, 24, 3, 30)
    messages = read("trainer", TrainerMessage)
    assert isinstance(messages[0], TrainerStarted) and messages[0].step == 0
    assert [message.step for message in messages[1:-1]] == [1, 2, 3]
    assert isinstance(messages[-1], TrainingDone) and messages[-1].version == 3
    assert len({sample for fate in read("fates", FateRecord) for sample in fate.sample_ids}) == 8
    assert [record.values["finetune/samples"] for record in read("metrics", MetricRecord)] == [8.0, 8.0, 8.0]
    finetune = tmp_path / "run" / "finetune"
    assert sorted(path.name for path in (finetune / "training_state").iterdir()) == ["2", "3"]
    assert sorted(path.name for path in (finetune / "intermediate").iterdir()) == ["2", "3"]
    assert AutoModelForCausalLM.from_pretrained(finetune / "current").dtype == torch.float32
    # A sign of life after every step and every micro-batch.
    assert read_heartbeat(context.run_dir.heartbeat_file("finetune_0")).progress >= 2 * 3
    assert CheckpointStore(finetune / "training_state", Ranks())


def write_batches(kit, context, steps):
    writer = context.streams.writer("training_data", "preprocessor_0", TrainingBatch)
    for step in steps:
        writer.write(kit.batch(kit.samples(8, seed=step), step=step))
    writer.close()


def test_a_value_head_is_trained_and_saved_beside_the_model(kit, role, tmp_path):
    context = role(
        rl=dict(advantage_estimator="gae", value_loss_coef=0.5, critic_learning_rate=0.1),
        max_train_steps=1,
        debug={"mode": "open_loop"},
    )
    write_batches(kit, context, (1,))
    run_trainer(context, {})
    folder = tmp_path / "run" / "finetune" / "current"
    head = load_file(folder / "value_head" / "model.safetensors")
    # Adam's first step moves every weight by its learning rate.
    assert head["bias"].abs().item() == pytest.approx(0.1, rel=1e-3)
    assert not any("value_head" in name for name in load_file(folder / "model.safetensors"))
