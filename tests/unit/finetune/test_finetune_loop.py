"""The whole loop in one process with fakes: order of messages, versions, probe, export, resume."""

import dataclasses
import os
import signal
import threading

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from pipelinerl.config.sections import StreamsConfig
from pipelinerl.errors import StreamError, UserError, WeightSyncError, WorkerError
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
from pipelinerl.finetune.stop_request import StopRequest, stop_on_sigterm
from pipelinerl.finetune.weights_feed import WeightsFeed
from pipelinerl.records import (
    FateRecord,
    StepDone,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
    VersionSpan,
    WeightUpdateSuccess,
)
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tracking.recorder import MetricRecorder


@pytest.fixture
def tokenizer_folder(tmp_path, kit):
    return kit.tokenizer(tmp_path / "tokenizer")


class Run:
    """One trainer with fakes around it."""

    def __init__(self, kit, root, tokenizer, batches, publisher=None, state=None, incarnation=0, **config):
        self.config = kit.config(**config)
        self.ranks = Ranks()
        self.policy = kit.policy()
        self.backend = PlainBackend(self.policy, self.config, self.ranks)
        self.store = CheckpointStore(root / "training_state", self.ranks)
        self.state = state or self.store.restore(self.backend) or TrainerState()
        self.written, self.metrics = [], kit.writer()
        self.publisher = publisher or kit.publisher()
        self.heartbeat = kit.heartbeat()
        log = kit.writer(self.written)
        self.loop = TrainingLoop(
            config=self.config,
            backend=self.backend,
            feed=DataFeed(kit.reader(batches, self.state.data_offset), self.heartbeat, 1.0),
            steps=StepRunner(self.backend, self.config, self.ranks, schedule_of(self.config)),
            weights=WeightsFeed(self.backend, self.ranks, self.publisher, torch.float32),
            checkpoints=self.store,
            exporter=ModelExporter(root, str(tokenizer), self.ranks),
            reporter=Reporter(log, log, MetricRecorder(self.metrics, "finetune_0"), incarnation, clock=lambda: 5.0),
            heartbeat=self.heartbeat,
            export_dtype=torch.float32,
            first_probe_tokens=[[3, 5, 7, 9]],
        )

    def run(self):
        self.state = self.loop.run(self.state)
        return self

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}


@pytest.fixture
def batches(kit):
    return [kit.batch(kit.samples(12, seed=step), step=step) for step in range(1, 5)]


@pytest.fixture
def start(kit, tmp_path, tokenizer_folder, batches):
    def make(folder="run", **options):
        return Run(kit, tmp_path / folder, tokenizer_folder, options.pop("batches", batches), **options)

    return make


def test_messages_come_in_order_and_the_final_model_is_the_one_that_was_sent(start, tmp_path):
    run = start().run()
    kinds = [type(record) for record in run.written]
    step = [WeightUpdateSuccess, FateRecord, FateRecord, FateRecord, StepDone]
    assert kinds == [TrainerStarted, WeightUpdateSuccess, *step * 4, TrainingDone]
    assert run.written[0] == TrainerStarted(step=0, data_offset=0, time=5.0)
    assert run.publisher.versions == [0, 1, 2, 3, 4]
    assert run.heartbeat.steps == 4
    updates = [record for record in run.written if isinstance(record, WeightUpdateSuccess)]
    assert [update.probe_abs_diff is not None for update in updates] == [True, True, False, False, True]
    assert all(update.probe_abs_diff < 1e-5 for update in updates if update.probe_abs_diff is not None)
    assert updates[0].seconds["pause"] == 0.01 and updates[0].num_servers == 1
    fates = [record for record in run.written if isinstance(record, FateRecord)]
    assert sum(len(fate.sample_ids) for fate in fates) == 48
    assert {(fate.fate, fate.source) for fate in fates} == {("trained", "finetune_0")}
    assert [fate.version for fate in fates] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert run.written[-1] == TrainingDone(version=4, time=5.0, samples_processed=48)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "current").state_dict()
    for name, tensor in run.policy.language_model.state_dict().items():
        assert torch.equal(saved[name], tensor), name
    assert (tmp_path / "run" / "current" / "tokenizer.json").exists()


def test_metrics_of_a_step(start, batches):
    run = start().run()
    values = [record.values for record in run.metrics.written]
    assert [record.step for record in run.metrics.written] == [1, 2, 3, 4]
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


def test_an_update_interval_still_delivers_the_last_version(start):
    run = start(weight_update_interval=3).run()
    assert run.publisher.versions == [0, 3, 4]


def probed(run):
    return [
        record.version
        for record in run.written
        if isinstance(record, WeightUpdateSuccess) and record.probe_abs_diff is not None
    ]


@pytest.mark.parametrize(
    ("every", "interval", "versions"),
    [(0, 1, [0, 1, 4]), (1, 1, [0, 1, 2, 3, 4]), (2, 1, [0, 1, 2, 4]), (3, 1, [0, 1, 3, 4]), (1, 2, [0, 2, 4])],
)
def test_probes_follow_the_updates_that_are_asked_for(start, every, interval, versions):
    run = start(weight_update_interval=interval)
    run.loop = dataclasses.replace(run.loop, probe_every_n_updates=every)
    assert probed(run.run()) == versions


def test_a_resumed_run_probes_in_the_same_rhythm(start):
    start("cut", interrupt_train_steps=1).run()
    resumed = start("cut")
    resumed.loop = dataclasses.replace(resumed.loop, probe_every_n_updates=3)
    # Version 1 is its first, 2 the first update behind the start, 3 the third update of the run, 4 the last.
    assert probed(resumed.run()) == [1, 2, 3, 4]


def test_interrupt_train_steps_ends_early_and_completely(start):
    run = start(interrupt_train_steps=2).run()
    assert run.publisher.versions == [0, 1, 2]
    assert isinstance(run.written[-1], TrainingDone)


def in_passes(batches, *epochs_done):
    return [replace(batch, epochs_done=done) for batch, done in zip(batches, epochs_done, strict=True)]


@pytest.mark.parametrize(
    ("epochs", "interval", "versions"),
    [(1, 1, [0, 1, 2, 3]), (1, 2, [0, 2, 4]), (2, 1, [0, 1, 2, 3, 4]), (None, 1, [0, 1, 2, 3, 4])],
)
def test_passes_end_training_completely(start, batches, epochs, interval, versions):
    """The batch of step 3 has the last group of the first pass; what is not sent yet then waits for the next update."""
    marked = in_passes(batches, 0.5, 0.9, 1.0, 1.2)
    run = start(batches=marked, max_epochs=epochs, weight_update_interval=interval).run()
    assert run.publisher.versions == versions
    assert isinstance(run.written[-1], TrainingDone) and run.written[-1].version == versions[-1]
    assert run.state.is_complete(run.config, interval)
    assert run.metrics.written[0].values["finetune/epochs_done"] == 0.5


def test_a_run_that_passes_ended_trains_on_only_for_more_passes(start, batches):
    marked = in_passes(batches, 0.5, 1.0, 1.5, 2.0)
    assert start("run", batches=marked, max_epochs=1).run().state.step == 2
    again = start("run", batches=marked, max_epochs=1).run()
    assert again.state.step == 2 and again.publisher.versions == [2]
    # What was recorded behind the end is trained then, and does not end it at once.
    assert start("run", batches=marked, max_epochs=2).run().publisher.versions == [2, 3, 4]


@pytest.mark.parametrize(("ends_behind", "interval", "versions"), [(3, 2, [0, 2, 3]), (2, 2, [0, 2]), (0, 1, [0])])
def test_training_is_complete_where_the_passes_leave_nothing_to_train(start, batches, ends_behind, interval, versions):
    run = start(batches=batches[:ends_behind], max_epochs=1, weight_update_interval=interval)
    run.loop.feed._ends_behind = lambda step: step == ends_behind
    run.run()
    assert run.publisher.versions == versions
    assert isinstance(run.written[-1], TrainingDone) and run.written[-1].version == ends_behind
    assert run.state.is_complete(run.config, interval)
    assert not run.store.restore(run.backend).is_over, "with more passes it trains on"
    assert start(batches=batches, max_epochs=2, weight_update_interval=interval).run().state.step == 4


def test_a_resumed_run_takes_the_same_steps_to_the_end_of_the_passes(start, batches):
    marked = in_passes(batches, 0.0, 0.6, 1.0, 1.5)
    whole = start("whole", batches=marked, max_epochs=1).run()
    start("cut", batches=marked, max_epochs=1, interrupt_train_steps=2).run()
    resumed = start("cut", batches=marked, max_epochs=1).run()
    assert resumed.state.step == 3
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_also_save_steps_save_between_the_regular_steps(start, tmp_path):
    start(save_checkpoint_steps=3, also_save_steps=[1]).run()
    for kind in ("training_state", "intermediate"):
        assert sorted(path.name for path in (tmp_path / "run" / kind).iterdir()) == ["1", "3", "4"]


def test_d1_the_entropy_bonus_goes_on_where_it_stood(start, kit):
    rl = {"target_entropy": 9.0, "entropy_bonus": 0.01, "entropy_bonus_step": 0.02}

    def begin(folder, **config):
        run = start(folder, rl=rl, **config)
        run.policy.with_entropy = True
        return run

    whole = begin("whole").run()
    begin("cut", interrupt_train_steps=2).run()
    resumed = begin("cut").run()

    def bonuses(run):
        return [record.values["rl/entropy_bonus"] for record in run.metrics.written]

    # The entropy of 50 words is below 3.92 nats, so the bonus grows with every step.
    assert bonuses(whole) == pytest.approx([0.01, 0.03, 0.05, 0.07])
    assert bonuses(resumed) == pytest.approx([0.05, 0.07])
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name
    # It is part of the loss: without it the weights are others.
    plain = start("plain").run()
    assert not all(torch.equal(tensor, plain.weights()[name]) for name, tensor in whole.weights().items())


def test_d1_resume_takes_the_same_steps_bit_by_bit(start, kit, batches):
    whole = start("whole").run()
    start("cut", interrupt_train_steps=2).run()
    resumed = start("cut")
    assert (resumed.state.step, resumed.state.data_offset, resumed.state.samples_processed) == (2, 2, 24)
    assert resumed.state.actor_offset == 20
    resumed.run()
    # The server starts with what the checkpoint holds, before any further step.
    assert resumed.publisher.versions == [2, 3, 4]
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name
    assert resumed.written[-1].samples_processed == 48


def test_l7_batches_behind_the_checkpoint_are_trained_again_as_they_are(start, batches):
    """Lines D1 and L7: the batches that were in the stream before need nobody else to come back."""
    start("cut", interrupt_train_steps=2).run()
    resumed = start("cut", incarnation=1).run()
    assert resumed.written[0] == TrainerStarted(step=2, data_offset=2, time=5.0, incarnation=1)
    trained = [name for record in resumed.written if isinstance(record, FateRecord) for name in record.sample_ids]
    assert trained == [sample.id for batch in batches[2:] for sample in batch.samples]
    assert (resumed.state.step, resumed.state.data_offset) == (4, 4)


class StopAfter:
    """Asked to stop once the trainer has taken `steps` steps."""

    def __init__(self, run, steps):
        self.run, self.steps = run, steps

    def agreed(self):
        return self.run.heartbeat.steps >= self.steps


def test_a_request_to_stop_saves_the_present_step(start, tmp_path):
    whole = start("whole").run()
    run = start("cut")
    run.loop = dataclasses.replace(run.loop, stop=StopAfter(run, 3))
    run.run()
    assert run.state.step == 3 and not isinstance(run.written[-1], TrainingDone)
    resumed = start("cut", incarnation=1)
    assert (resumed.state.step, resumed.state.data_offset) == (3, 3)
    resumed.run()
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_sigterm_ends_the_wait_for_data(tmp_path, kit):
    hub = StreamHub(StreamsConfig(), RunDir(tmp_path), "run")
    reader = hub.reader("training_data", "preprocessor_0", TrainingBatch)
    request = StopRequest(Ranks())
    feed = DataFeed(reader, kit.heartbeat(), 60.0, lambda: request.requested)
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(request, reader.wake):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert feed.next(1) is None
        assert request.agreed()
    assert signal.getsignal(signal.SIGTERM) is before
    with stop_on_sigterm(StopRequest(Ranks()), reader.wake):
        pass


def test_a_server_that_keeps_its_old_head_fails_the_run_after_the_first_update(start, kit):
    run = start(publisher=kit.publisher(stale_head=True))
    with pytest.raises(WeightSyncError, match=r"actor_llm_0: after the update to version 1 .* differ"):
        run.run()
    assert not any(isinstance(record, StepDone) for record in run.written)


def test_a_server_that_samples_wrongly_when_busy_ends_the_run_before_the_next_update(start, kit):
    """Every probe is right; the log-probs of what it sampled are not those of its weights."""
    samples = [
        replace(sample, version_spans=[VersionSpan(0, 0, len(sample.logprobs))]) for sample in kit.samples(128, seed=1)
    ]
    run = start(batches=[kit.batch(samples)])
    with pytest.raises(WeightSyncError, match="tokens that the weights in training had sampled differ by"):
        run.run()
    assert run.publisher.versions == [0]
    assert not any(isinstance(record, StepDone | FateRecord) for record in run.written)


def test_a_run_whose_sampling_is_cut_is_not_checked(start, kit):
    run = start(batches=[kit.batch(kit.samples(128, seed=1))], interrupt_train_steps=1)
    run.loop = dataclasses.replace(run.loop, checks_sampling=False)
    run.run()
    assert run.publisher.versions == [0, 1]


def test_numbers_of_the_trainer_that_are_not_finite_are_not_laid_on_a_server(start, kit):
    """Such a step is skipped; the next one may be well."""
    run = start(batches=[kit.batch(kit.samples(128, seed=1))], interrupt_train_steps=1)
    before = run.weights()
    forward = run.backend.forward

    def broken(*args, **options):
        outputs = forward(*args, **options)
        # The probe's forward pass has no `is_last`.
        return outputs._replace(logprobs=outputs.logprobs * float("nan")) if options else outputs

    run.backend.forward = broken
    run.run()
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())
    assert "finetune/grad_norm" not in run.metrics.written[0].values


def test_a_server_that_cannot_be_updated_ends_the_run_with_its_error(start, kit):
    with pytest.raises(WeightSyncError, match="actor_llm_0: could not be given version 0: HTTP 500 boom"):
        start(publisher=kit.publisher(fail="HTTP 500 boom")).run()


def test_missing_data_names_what_was_waited_for(start, batches):
    run = start(batches=batches[:1])
    with pytest.raises(WorkerError, match="no training data for 1 s"):
        run.run()
    assert run.heartbeat.waits[-1] == "training data"


def test_a_batch_out_of_order_is_refused(start, batches):
    with pytest.raises(StreamError, match="offset 1: got the batch of step 3, expected step 2"):
        start(batches=[batches[0], batches[2]]).run()


def test_a_gradient_that_is_not_finite_changes_nothing(start, kit, batches):
    run = start(interrupt_train_steps=1)
    before = run.weights()
    original = run.backend.backward
    run.backend.backward = lambda loss, *, is_last: original(loss * float("nan"), is_last=is_last)
    run.run()
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())
    assert "finetune/grad_norm" not in run.metrics.written[0].values


def test_a_damaged_training_state_is_refused(start, tmp_path):
    start("cut", interrupt_train_steps=2).run()
    file = tmp_path / "cut" / "training_state" / "2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="no training state can be used"):
        start("cut")
