"""Which rollouts are chosen, in which order, and how much is read and held for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import fate_record, step_done

from pipelinerl.analysis.select import Wanted, choose, fates_of, load, samples_of_step
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records import FateRecord, TrainerMessage, TrainerStarted, TrainingBatch
from pipelinerl.streams.base import ACTOR_TOPIC, FATES_TOPIC, TRAINER_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub

GROUPS = 40


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path, streams={"shard_bytes": 1500})
    run.write(*run.plain_groups(GROUPS))
    return run


def names(streams: StreamHub, **wanted: Any) -> list[str]:
    chosen, _ = choose(streams, Wanted(**wanted))
    loaded = list(load(streams, chosen))
    assert [each.rollout_id for each in loaded] == [each.rollout_id for each in chosen]
    return [each.rollout_id for each in loaded]


def test_last_and_first_are_in_the_order_of_the_stream(run: RecordedRun) -> None:
    streams = run.streams()
    everything = [f"0-{n}/r{k}" for n in range(GROUPS) for k in range(2)]
    for count in (1, 3, 100):
        assert names(streams, order="last", count=count) == everything[-count:]
        assert names(streams, order="first", count=count) == everything[:count]
    assert names(streams, order="last", count=None) == everything


def test_best_and_worst_are_by_reward(run: RecordedRun) -> None:
    streams = run.streams()
    assert names(streams, order="best", count=3) == ["0-39/r0", "0-38/r0", "0-37/r0"]
    assert names(streams, order="worst", count=2) == ["0-39/r1", "0-38/r1"]
    run.write(*run.plain_groups(1, first=39), topic=ACTOR_TOPIC)
    assert [each.offset for each in choose(streams, Wanted(order="best", count=2))[0]] == [40, 39], "the newer first"


def test_filters_hold_together(run: RecordedRun) -> None:
    run.write(*run.plain_groups(3, first=100, dataset_name="other"))
    streams = run.streams()
    assert names(streams, dataset="train") == ["0-38/r1", "0-39/r0", "0-39/r1"]
    assert names(streams, dataset="other", order="worst", count=1) == ["0-102/r1"]
    assert names(streams, version=5) == ["0-5/r0", "0-5/r1"]
    assert names(streams, version=5, dataset="other") == []
    assert names(streams, name="0-7", count=None) == ["0-7/r0", "0-7/r1"]
    assert names(streams, name="0-7/r1") == ["0-7/r1"]
    assert names(streams, name="0-7/r1/s0", order="best") == ["0-7/r1"]
    assert names(streams, sample_ids=frozenset(["0-9/r0/s0"])) == ["0-9/r0"]


def test_the_newest_are_found_without_reading_the_rest(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = run.streams()
    places = streams.places(ACTOR_TOPIC, "actor_0")
    assert places[0] == 0 and places == sorted(set(places)) and len(places) >= GROUPS // 6
    _, seen = choose(streams, Wanted(order="last", count=3))
    assert seen.groups <= 8
    _, seen = choose(streams, Wanted(order="last", dataset="nix"))
    assert seen.groups == GROUPS and seen.datasets == {"train"} and seen.versions == (0, GROUPS - 1)
    _, seen = choose(streams, Wanted(order="first", count=3))
    assert seen.groups == 2
    # A stream without places is read from its start, and the answer is the same.
    monkeypatch.setattr(StreamHub, "places", lambda *_: [0])
    assert names(streams, order="last") == ["0-38/r1", "0-39/r0", "0-39/r1"]


def test_a_torn_last_line_is_passed_over_and_a_damaged_record_is_named(run: RecordedRun) -> None:
    shard = sorted((run.root / "streams/actor/actor_0/0").glob("*.jsonl"))[-1]
    whole = shard.read_bytes()
    shard.write_bytes(whole + b'{"id": "0-40", "sam')
    assert names(run.streams(), count=1) == ["0-39/r1"]
    shard.write_bytes(whole + b"{ broken \x1b[2J\n")
    with pytest.raises(StreamError, match=rf"{shard}.*offset 40"):
        choose(run.streams(), Wanted())


def test_tokens_that_were_removed_leave_the_rest(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, streams={"retention": "heads", "shard_bytes": 2000})
    run.write(*run.plain_groups(6))
    run.streams().commit(ACTOR_TOPIC, "actor_0", 6)
    run.write(*run.plain_groups(6, first=6))
    streams = run.streams()
    (oldest,) = load(streams, choose(streams, Wanted(order="first", count=1))[0])
    assert oldest.rollout_id == "0-0/r0" and oldest.samples[0].input_ids == []
    (newest,) = load(streams, choose(streams, Wanted(order="last", count=1))[0])
    assert newest.samples[0].input_ids != []


def test_reading_creates_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    streams = run.streams()
    before = sorted(run.root.rglob("*"))
    assert choose(streams, Wanted())[0] == []
    assert fates_of(streams, []) == {}
    with pytest.raises(ConfigError, match="no batch was made yet"):
        samples_of_step(streams, 1)
    assert sorted(run.root.rglob("*")) == before


@pytest.mark.parametrize("shard_bytes", [1, 10_000, 1 << 20])
def test_a_step_that_is_not_there_is_refused_with_the_last_one(tmp_path: Path, shard_bytes: int) -> None:
    run = RecordedRun(tmp_path, streams={"shard_bytes": 10_000})
    streams = run.streams()
    for last, group in enumerate(run.plain_groups(5), 1):
        batch = TrainingBatch(
            id=f"b{last}", step=last, samples=group.samples, group_ids=[group.id], plan=[[[0, 1]]], actor_offset=last
        )
        run.write(batch, topic=TRAINING_DATA_TOPIC, instance="preprocessor_0", kind=TrainingBatch)
        assert samples_of_step(streams, last) == {sample.id for sample in group.samples}
        for step in (last + 1, last + 2, 10**30):
            with pytest.raises(ConfigError, match=rf"--step: got {step}, expected one of the steps 1 to {last} that"):
                samples_of_step(streams, step)


def test_steps_and_fates_follow_the_line_of_steps(run: RecordedRun) -> None:
    groups = run.plain_groups(4)
    batches = [
        TrainingBatch(
            id=f"b{step}",
            step=step,
            samples=groups[step].samples,
            group_ids=[groups[step].id],
            plan=[[[0, 1]]],
            actor_offset=step,
        )
        for step in (1, 2, 3)
    ]
    run.write(*batches, topic=TRAINING_DATA_TOPIC, instance="preprocessor_0", kind=TrainingBatch)
    run.write(
        *(step_done(n) for n in (1, 2)),
        TrainerStarted(step=1, data_offset=1, time=1, incarnation=1),
        topic=TRAINER_TOPIC,
        instance="finetune_0",
        kind=TrainerMessage,
    )

    def fate(kind: Any, group: int, reason: str, version: int = 0) -> FateRecord:
        ids = [sample.id for sample in groups[group].samples]
        return fate_record(kind, *ids, reason=reason, version=version, group_id=groups[group].id)

    run.write(
        fate("trained", 1, "step", 1),
        fate("trained", 2, "step", 2),
        topic=FATES_TOPIC,
        instance="finetune_0",
        kind=FateRecord,
    )
    run.write(fate("filtered", 0, "zero_advantage"), topic=FATES_TOPIC, instance="preprocessor_0", kind=FateRecord)
    streams = run.streams()
    assert samples_of_step(streams, 2) == {"0-2/r0/s0", "0-2/r1/s0"}
    with pytest.raises(ConfigError, match=r"--step: got 9, expected one of the steps 1 to 3"):
        samples_of_step(streams, 9)
    chosen, _ = choose(streams, Wanted(order="first", count=8))
    found = fates_of(streams, chosen)
    assert {name: text for name, text in found.items() if "/r0/" in name} == {
        "0-0/r0/s0": "filtered: zero_advantage",
        "0-1/r0/s0": "trained in step 1",
    }, "step 2 was rolled back"
