"""Failure limit, throughput, averages, and the messages between actor and workers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import msgspec
import pytest
import uvloop

from pipelinerl.actor import stats
from pipelinerl.actor.stats import FailureLimit, RolloutAverages, Throughput
from pipelinerl.actor.worker_messages import (
    CancelRollout,
    Connection,
    StartRollout,
    ToWorker,
)
from pipelinerl.errors import WorkerError
from pipelinerl.records import RolloutSummary


def test_the_run_ends_when_too_many_of_the_latest_rollouts_fail() -> None:
    limit = FailureLimit(max_rate=0.5, min_rollouts=4)
    for _ in range(3):
        limit.record_failure("http_400", "no")
    with pytest.raises(WorkerError, match=r"4 of the last 4 rollouts failed.*http_400: 3, timeout: 1.*Last one: slow"):
        limit.record_failure("timeout", "slow")
    assert limit.reasons.total() == 4


def test_exactly_the_allowed_rate_goes_on_and_old_failures_are_forgotten() -> None:
    limit = FailureLimit(max_rate=0.5, min_rollouts=2)
    limit.record_success()
    limit.record_failure("x", "")
    for _ in range(300):
        limit.record_success()
    for _ in range(128):
        limit.record_failure("x", "")
    with pytest.raises(WorkerError):
        limit.record_failure("x", "")


def test_throughput_over_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stats, "monotonic", lambda: now[0])
    window = Throughput(size=2)
    assert window.rates()["actor/rollouts_per_s"] == 0
    for second in (1.0, 2.0):
        now[0] = second
        window.add(output_tokens=10, requests=3)
    assert window.rates() == {
        "actor/output_tokens_per_s": 10.0,
        "actor/rollouts_per_s": 1.0,
        "actor/requests_per_s": 3.0,
    }
    now[0] = 4.0
    window.add(output_tokens=40, requests=1)
    # Two rollouts are left, and the window starts where the first one fell out: 50 tokens in 3 s.
    assert window.rates()["actor/output_tokens_per_s"] == pytest.approx(50 / 3)
    window.restart()
    now[0] = 5.0
    assert window.rates()["actor/output_tokens_per_s"] == 0


def test_averages_by_data_set_start_again_after_each_report() -> None:
    averages = RolloutAverages()
    for reward, name in ((1.0, "a"), (0.0, "a"), (0.5, "b")):
        averages.add(
            RolloutSummary(
                rollout_id="r",
                reward=reward,
                success=reward == 1,
                num_samples=2,
                output_tokens=4,
                latency_s=1.0,
                metrics={"turns": reward * 2},
            ),
            name,
        )
    means = averages.take()
    assert (means["actor/reward_mean"], means["actor/success_rate"]) == (0.5, pytest.approx(1 / 3))
    assert (means["actor/a/reward"], means["actor/b/reward"], means["actor/a/turns"]) == (0.5, 0.5, 1.0)
    assert averages.take() == {}


def encoded(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(4, "big") + payload


def receiving(content: bytes) -> Connection[ToWorker]:
    reader = asyncio.StreamReader()
    reader.feed_data(content)
    reader.feed_eof()
    return Connection(reader, SimpleNamespace(), ToWorker)  # type: ignore[arg-type]


async def test_messages_arrive_and_a_lost_end_is_an_end() -> None:
    start = StartRollout("g/r0", "g", {"text": "ü", "data": b"\x00", "list": [1, None, 0.5]}, seed=2**62, ticket=1)
    connection = receiving(encoded(start) + encoded(CancelRollout(1)) + encoded(start)[:-1])
    assert [await connection.receive() for _ in range(3)] == [start, CancelRollout(1), None]


async def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        await receiving(b"\x00\x00\x00\x01\x05").receive()
    with pytest.raises(ValueError, match="4294967295 bytes"):
        await receiving(b"\xff\xff\xff\xff").receive()


def test_l3_what_is_for_a_dead_end_is_dropped_on_the_event_loop_of_the_actor() -> None:
    """An end that dies with unread bytes in its socket resets the connection; every later message has nowhere to go."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        connection: Connection[ToWorker] = Connection(reader, writer, ToWorker)
        connection.send(CancelRollout(1))
        theirs.close()
        assert await connection.receive() is None
        for ticket in range(3):
            connection.send(CancelRollout(ticket))
            await asyncio.sleep(0)
        connection.close()

    uvloop.run(run())
