"""What a restarted actor finds in the streams (D8 after a resume), and messages of other incarnations (L7)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from fakes.short_sample import evaluation_result, short_sample

from pipelinerl.actor.budget import FixedLag, SampleBudget
from pipelinerl.actor.evaluator import find_evaluations
from pipelinerl.actor.groups import find_started_groups, find_unsettled_groups
from pipelinerl.actor.progress import Changes, TrainingProgress
from pipelinerl.config.resources import FileStreams
from pipelinerl.records import (
    EvaluationResult,
    FateRecord,
    Group,
    StepDone,
    TrainingBatch,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub


def group(number: int) -> Group:
    group_id = f"0-{number}"
    samples = [short_sample(f"{group_id}/r0/s{index}") for index in range(2)]
    return Group(id=group_id, problem_id="p", dataset_name="d", samples=samples, rollouts=[])


def batch(step: int, groups: list[int], actor_offset: int) -> TrainingBatch:
    ids = [f"0-{number}" for number in groups]
    return TrainingBatch(id=f"0-{step}", step=step, samples=[], group_ids=ids, plan=[], actor_offset=actor_offset)


def write(hub: StreamHub, topic: str, instance: str, record_type: Any, *records: Any) -> None:
    writer = hub.writer(topic, instance, record_type)
    for record in records:
        writer.write(record)
    writer.close()


def fate(sample_ids: list[str], kind: Any) -> FateRecord:
    return FateRecord(sample_ids=sample_ids, fate=kind, reason="r", version=1, group_id="0-4", source="preprocessor_0")


def test_groups_in_later_batches_and_in_no_batch_are_in_flight(tmp_path: Path) -> None:
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run")
    assert find_unsettled_groups(hub, "actor_0", 0) == {}
    assert find_evaluations(hub, "actor_0") == set()
    write(hub, "actor", "actor_0", Group, *(group(number) for number in range(6)))
    # Group 1 overtook group 0, which is in the second batch.
    batches = batch(1, [1], 0), batch(2, [0, 2], 3), batch(3, [3], 4)
    write(hub, "training_data", "preprocessor_0", TrainingBatch, *batches)
    fates = fate(["0-4/r0/s0"], "filtered"), fate(["0-5/r0/s0"], "pending")
    write(hub, "fates", "preprocessor_0", FateRecord, *fates)
    both = {number: [f"0-{number}/r0/s{index}" for index in range(2)] for number in range(6)}
    assert find_unsettled_groups(hub, "actor_0", 2) == {"0-3": both[3], "0-4": ["0-4/r0/s1"], "0-5": both[5]}
    assert set(find_unsettled_groups(hub, "actor_0", 1)) == {"0-0", "0-2", "0-3", "0-4", "0-5"}
    assert set(find_unsettled_groups(hub, "actor_0", 3)) == {"0-4", "0-5"}
    write(hub, "evaluation", "actor_0", EvaluationResult, evaluation_result(0, 0.0))
    assert find_evaluations(hub, "actor_0") == {(0, False)}


def actor_fate(group_id: str, kind: Any, reason: str, num_rollouts: int) -> FateRecord:
    own = {"group_id": group_id, "reason": reason, "source": "actor_0", "num_rollouts": num_rollouts}
    return msgspec.structs.replace(fate([], kind), **own)


def test_d1_l4_groups_that_were_cut_off_are_run_again_at_their_place(tmp_path: Path) -> None:
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run")
    assert find_started_groups(hub, "actor_0").next_number == 0
    write(hub, "actor", "actor_0", Group, group(0), group(3))
    fates = [actor_fate(f"0-{number}", "pending", "started", 4) for number in range(6)]
    fates += [
        actor_fate("0-1", "failed", "rollout_timeout", 4),  # came to its end, without a sample
        actor_fate("0-2", "failed", "rollout_timeout", 1),  # three attempts were running
        actor_fate("0-3", "failed", "rollout_timeout", 1),  # published without that one
        actor_fate("0-5", "unused", "training_done", 4),
    ]
    write(hub, "fates", "actor_0", FateRecord, *fates)
    found = find_started_groups(hub, "actor_0")
    assert found.open_groups == {"0-2": 3, "0-4": 4}
    assert (found.numbers_due, found.next_number) == ([2, 4, 5], 6)
    # The next actor writes these fates and dies at once: the same groups are due, and nothing is open.
    again = [actor_fate(name, "unused", "interrupted", count) for name, count in found.open_groups.items()]
    write(hub, "fates", "actor_0", FateRecord, *again)
    found = find_started_groups(hub, "actor_0")
    assert (found.open_groups, found.numbers_due, found.next_number) == ({}, [2, 4, 5], 6)
    # It comes far enough to publish one of them.
    write(hub, "actor", "actor_0", Group, msgspec.structs.replace(group(2), id="1-2"))
    write(hub, "fates", "actor_0", FateRecord, actor_fate("1-2", "pending", "started", 4))
    assert find_started_groups(hub, "actor_0").numbers_due == [4, 5]


def updated(version: int, incarnation: int) -> WeightUpdateSuccess:
    return WeightUpdateSuccess(version=version, time=0, seconds={}, num_servers=1, incarnation=incarnation)


def test_only_updates_of_this_incarnation_count() -> None:
    state = TrainingProgress(SampleBudget(FixedLag(8, 0), 2), 1, Changes())
    state.apply_message(updated(7, incarnation=0))
    state.apply_message(TrainingDone(version=7, time=0, samples_processed=1, incarnation=0))
    assert state.version is None and not state.done
    state.apply_message(updated(5, incarnation=1))
    assert state.version == 5
    state.apply_message(TrainingDone(version=6, time=0, samples_processed=1, incarnation=1))
    assert (state.version, state.done) == (6, True)


async def test_steps_and_fates_settle_and_wake_who_waits() -> None:
    budget = SampleBudget(FixedLag(2, 0), 2)
    state = TrainingProgress(budget, 0, Changes())
    budget.observe_rollout(1)
    budget.publish("0-1", ["0-1/r0/s0", "0-1/r1/s0"])
    budget.publish("0-4", ["0-4/r0/s0"])
    waiter = asyncio.create_task(state.changes.wait_for(lambda: budget.charged_samples == 0))
    await asyncio.sleep(0)
    state.apply_fate(fate(["0-4/r0/s0"], "stale"))
    await asyncio.sleep(0)
    assert budget.charged_samples == 2 and not waiter.done()
    state.apply_message(StepDone(step=1, time=0, group_ids=["0-1"], num_samples=2, samples_processed=2))
    await asyncio.wait_for(waiter, 60)
