"""The loop over real file streams: batches, fates, back-pressure, restart, end."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace
from preprocess_groups import context, group, sample

from pipelinerl.actor.budget import FixedLag, SampleBudget
from pipelinerl.actor.progress import Changes, TrainingProgress
from pipelinerl.preprocess.main import main, reference_scorer
from pipelinerl.records import (
    FateRecord,
    Group,
    MetricRecord,
    PassesOver,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
)

LIMIT_S = 60.0
FINETUNE = {"train_batch_size": 1, "gradient_accumulation_passes": 4, "seq_length": 64}


class Run:
    """A preprocessor in a thread, with the ends of its streams in the test's hands."""

    def __init__(self, tmp_path, incarnation=0, **config):
        self.context = context(tmp_path, incarnation, **{"finetune": FINETUNE, **config})
        streams = self.context.streams
        self.actor = streams.writer("actor", "actor_0", Group)
        self.trainer = streams.writer("trainer", "finetune_0", TrainerMessage)
        self.batches = streams.reader("training_data", "preprocessor_0", TrainingBatch)
        self.error = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self):
        try:
            main(self.context)
        except BaseException as error:  # noqa: BLE001 - shown by finish()
            self.error = error

    def next_batch(self, timeout_s=LIMIT_S):
        entries = self.batches.read(timeout_s, max_records=1)
        return entries[0].record if entries else None

    def step_done(self, step):
        self.trainer.write(
            StepDone(
                step=step,
                time=0,
                group_ids=[],
                num_samples=4,
                samples_processed=4 * step,
                incarnation=self.context.incarnation,
            )
        )

    def finish(self):
        self.trainer.write(TrainingDone(version=1, time=0, samples_processed=4, incarnation=self.context.incarnation))
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        self.actor.close()
        self.trainer.close()
        assert self.error is None

    def fates(self):
        entries = self.context.streams.reader("fates", "preprocessor_0", FateRecord).read(0)
        return [(entry.record.sample_ids, entry.record.fate, entry.record.reason) for entry in entries]


def test_groups_become_batches_until_training_is_done(tmp_path):
    run = Run(tmp_path)
    for name in ("0-0", "0-1", "0-2"):
        run.actor.write(group(name))
    batch = run.next_batch()
    assert (batch.step, batch.group_ids, batch.actor_offset) == (1, ["0-0", "0-1"], 2)
    assert [item.advantage for item in batch.samples] == [1.0, -1.0, 1.0, -1.0]
    assert batch.plan == [[[0, 1, 2, 3]]]
    assert batch.metrics["preprocessor/reward_mean"] == 0.5
    run.actor.write(group("0-3"))
    assert run.next_batch().step == 2
    run.finish()
    metrics = run.context.streams.reader("metrics", "preprocessor_0", MetricRecord).read(0)
    assert [entry.record.step for entry in metrics] == [1, 2]
    wanted = {"preprocessor/queue_batches", "preprocessor/filtered_samples", "preprocessor/stale_samples"}
    assert wanted <= set(metrics[0].record.values)


def test_fates_of_what_is_not_trained(tmp_path):
    run = Run(tmp_path, finetune={**FINETUNE, "rl": {"filter_zero_advantage_groups": True}})
    run.actor.write(group("0-0", samples=[sample("0-0/r0/s0", 1.0, output=90), sample("0-0/r1/s0", 0.0)]))
    run.actor.write(group("0-1", rewards=(1.0, 1.0)))
    run.actor.write(group("0-2", rewards=(1.0, 0.0, 0.0)))
    batch = run.next_batch()
    # The long sample is not trained, but its reward stays in the baseline of the other.
    assert batch.samples[0].id == "0-0/r1/s0"
    assert batch.samples[0].advantage == -1.0
    run.finish()
    assert run.fates() == [
        (["0-0/r0/s0"], "filtered", "longer_than_seq_length"),
        (["0-1/r0/s0", "0-1/r1/s0"], "filtered", "zero_advantage"),
    ]


def test_dynamic_sampling_refills_the_batch_and_gives_the_budget_back(tmp_path):
    """On-policy, where the budget is one batch: each filtered group admits exactly one other, until it is full."""
    run = Run(tmp_path, max_lag=0, finetune={**FINETUNE, "rl": {"filter_zero_advantage_groups": True}})
    budget = SampleBudget(FixedLag(4, 0), attempts=2)
    budget.observe_rollout(1)
    trainer = TrainingProgress(budget, 0, Changes())
    fates = run.context.streams.reader("fates", "preprocessor_0", FateRecord)
    # Equal rewards: nothing to learn from 0-0, 0-2 and 0-3.
    rewards = [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    for number, pair in enumerate(rewards):
        assert budget.allows_group()
        group_id = f"0-{number}"
        budget.start_group(group_id)
        made = group(group_id, rewards=pair)
        for _ in pair:
            budget.end_rollout(group_id, 1)
        budget.publish(group_id, [item.id for item in made.samples])
        run.actor.write(made)
        if pair[0] == pair[1]:
            assert run.next_batch(0) is None
            (entry,) = fates.read(LIMIT_S, max_records=1)
            assert entry.record.group_id == group_id and entry.record.reason == "zero_advantage"
            trainer.apply_fate(entry.record)
    batch = run.next_batch()
    assert batch.group_ids == ["0-1", "0-4"] and len(batch.samples) == 4
    assert budget.charged_samples == 4 and not budget.allows_group()
    trainer.apply_message(StepDone(step=1, time=0, group_ids=batch.group_ids, num_samples=4, samples_processed=4))
    assert budget.charged_samples == 0 and budget.allows_group()
    run.finish()


def test_a_batch_says_how_many_passes_its_groups_have_done(tmp_path):
    """Also where the group that ends a pass is filtered: those behind it know it as well."""
    run = Run(tmp_path, finetune={**FINETUNE, "rl": {"filter_zero_advantage_groups": True}})
    for number, (done, rewards) in enumerate(
        [(0.5, (1, 0)), (0.25, (1, 0)), (1.0, (1, 1)), (1.0, (1, 0)), (1.5, (0, 1))]
    ):
        run.actor.write(replace(group(f"0-{number}", rewards), epochs_done=done))
    run.actor.flush()
    assert [run.next_batch().epochs_done for _ in range(2)] == [0.5, 1.5]
    run.finish()


PASSES = {**FINETUNE, "max_epochs": 1, "rl": {"filter_zero_advantage_groups": True}}


def passes_over(run):
    entries = run.context.streams.reader("passes", "preprocessor_0", PassesOver).read(0)
    return [(entry.record.step, entry.record.max_epochs) for entry in entries]


def write_groups(run, groups, first=0):
    """Groups of (passes that are done, whether they are filtered)."""
    for number, (done, is_filtered) in enumerate(groups, first):
        run.actor.write(replace(group(f"0-{number}", (1, 1) if is_filtered else (1, 0)), epochs_done=done))
    run.actor.flush()


def wait_for_end(run):
    """Until the loop does not wait for groups any more: all that was written is digested."""
    reader = run.context.streams.reader("passes", "preprocessor_0", PassesOver)
    assert reader.read(LIMIT_S), "nothing was said of the end"


def test_the_last_step_of_the_passes_is_closed_with_what_there_is(tmp_path):
    """One more pass does not fill it, because all its groups are filtered."""
    run = Run(tmp_path, finetune=PASSES)
    write_groups(run, [(0.5, False), (1.0, True), (1.5, True), (1.9, True)])
    assert run.next_batch(timeout_s=0.1) is None
    write_groups(run, [(2.0, True)], first=4)
    batch = run.next_batch()
    assert (batch.group_ids, batch.epochs_done) == (["0-0"], 2.0)
    write_groups(run, [(2.5, False), (3.0, False)], first=5)
    assert run.next_batch(timeout_s=0.1) is None, "training ends with it"
    run.finish()
    assert passes_over(run) == []


def test_where_nothing_is_left_for_a_last_step_the_trainer_is_told(tmp_path):
    run = Run(tmp_path, finetune=PASSES)
    write_groups(run, [(0.2, False), (0.4, False), *((n / 2, True) for n in range(1, 5))])
    assert run.next_batch().epochs_done == 0.4
    wait_for_end(run)
    write_groups(run, [(2.5, False), (3.0, False)], first=6)
    assert run.next_batch(timeout_s=0.1) is None
    run.finish()
    assert passes_over(run) == [(1, 1)]
    # More passes than those that were over then: what came behind them is trained.
    more = Run(tmp_path, incarnation=1, finetune={**PASSES, "max_epochs": 4})
    more.batches = more.context.streams.reader("training_data", "preprocessor_0", TrainingBatch, 1)
    more.trainer.write(TrainerStarted(step=1, data_offset=1, time=0, incarnation=1))
    batch = more.next_batch()
    assert (batch.step, batch.group_ids) == (2, ["0-6", "0-7"])
    more.finish()


@pytest.mark.parametrize(
    "keys",
    [{"finetune": {**PASSES, "weight_update_interval": 4}}, {"schedule": "conventional", "steps_per_generation": 3}],
    ids=["interval", "round"],
)
def test_the_rest_is_not_waited_for_up_to_the_next_update(tmp_path, keys):
    """Behind it the trainer is told that nothing comes; groups of further passes stay where they are."""
    run = Run(tmp_path, **{"finetune": PASSES, **keys})
    write_groups(run, [(0.5, False), *((n / 2, True) for n in range(2, 5))])
    batch = run.next_batch()
    assert (batch.group_ids, batch.epochs_done) == (["0-0"], 2.0)
    wait_for_end(run)
    write_groups(run, [(2.5, False), (3.0, False), (3.5, False)], first=4)
    assert run.next_batch(timeout_s=0.1) is None
    run.finish()
    assert passes_over(run) == [(1, 1)]


def test_restart_neither_loses_nor_repeats(tmp_path):
    first = Run(tmp_path, finetune={**FINETUNE, "rl": {"filter_zero_advantage_groups": True}})
    first.actor.write(group("0-0"))
    first.actor.write(group("0-1", rewards=(0.0, 0.0)))
    first.actor.write(group("0-2"))
    first.actor.write(group("0-3"))
    assert first.next_batch().group_ids == ["0-0", "0-2"]
    first.finish()

    second = Run(tmp_path, incarnation=1, finetune={**FINETUNE, "rl": {"filter_zero_advantage_groups": True}})
    second.trainer.write(TrainerStarted(step=0, data_offset=0, time=0, incarnation=1))
    second.actor.write(group("1-0"))
    assert second.next_batch().step == 1
    batch = second.next_batch()
    assert (batch.step, batch.group_ids, batch.id) == (2, ["0-3", "1-0"], "1-2")
    second.finish()
    settled = [name for ids, _, _ in second.fates() for name in ids]
    assert sorted(settled) == ["0-1/r0/s0", "0-1/r1/s0"]


def test_d1_samples_of_a_version_that_was_lost_are_never_fresh(tmp_path):
    """The machine lost the batch of step 2 and a group of version 2 outlived it: the new version 2 is another one."""
    first = Run(tmp_path)
    first.actor.write(group("0-0"))
    first.actor.write(group("0-1"))
    first.next_batch()
    first.actor.write(group("0-2", version=2))
    first.actor.write(group("0-3", version=1))
    first.finish()
    second = Run(tmp_path, incarnation=1)
    second.trainer.write(TrainerStarted(step=1, data_offset=1, time=0, incarnation=1))
    second.actor.write(group("1-0", version=1))
    second.next_batch()
    assert second.next_batch().group_ids == ["0-3", "1-0"]
    second.finish()
    assert (["0-2/r0/s0", "0-2/r1/s0"], "stale", "rolled_back") in second.fates()


def test_a_group_delivered_twice_has_one_effect(tmp_path):
    run = Run(tmp_path)
    for name in ("0-0", "0-0", "0-1"):
        run.actor.write(group(name))
    assert run.next_batch().group_ids == ["0-0", "0-1"]
    run.finish()


def test_a_broken_trainer_stream_ends_the_loop(tmp_path):
    run = Run(tmp_path)
    run.trainer.close()
    shard = next((tmp_path / "streams" / "trainer").rglob("*.jsonl"))
    shard.write_bytes(b"not json\n")
    run.thread.join(LIMIT_S)
    assert run.error is not None and "trainer" in str(run.error)
    run.actor.close()


@pytest.mark.parametrize("rl", [{"kl_coef": 0.1}, {"final_kl_coef": 0.1}, {}])
def test_no_reference_servers_means_no_scorer(tmp_path, rl):
    assert reference_scorer(context(tmp_path, finetune={"rl": rl})) is None
