"""Servers that never answer in an update: they get a second attempt and hold up nobody else (line L1)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes.fake_server import FakeServer, Fault
from fakes.synced_servers import HANG_S, LIMIT_S, SHAPES, assert_has, assert_recovers, small_model

from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.link import UPDATE_PATH, ServerAddress
from pipelinerl.weights.sync import WeightPublisher


@pytest.fixture
def model() -> torch.nn.Module:
    return small_model()


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(SHAPES) as first, FakeServer(SHAPES) as second:
        yield first, second


def test_l1_a_server_that_hangs_recovers_and_the_other_one_is_not_held_up(model) -> None:
    """Before the update and after it: one pair of servers for each, at the same time."""

    def hang(is_late: bool) -> None:
        with FakeServer(SHAPES) as first, FakeServer(SHAPES) as second:
            assert_recovers((first, second), model, Fault("hang", is_late=is_late), HANG_S)

    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(hang, is_late) for is_late in (False, True)]:
            ended.result()


def test_l1_a_server_that_takes_no_more_buffers_leaves_time_for_the_others(servers, model) -> None:
    """All get the same buffers in turn, and there are more of them than may wait for one server."""
    with FakeServer(SHAPES) as third:
        three = (*servers, third)
        # The two that hang take a part of the time, one after the other.
        with WeightPublisher(third.token, timeout_s=2 * HANG_S, chunk_bytes=1) as publisher:
            addresses = [ServerAddress(f"server_{index}", server.url) for index, server in enumerate(three)]
            publisher.connect(addresses, start_timeout_s=LIMIT_S)
            for server in servers:
                server.inject(UPDATE_PATH, Fault("hang"))
            # Three buffers and the end of them are one more than may wait or be on the way.
            report = publisher.publish(1, ModuleSource(model))
            assert report.failed == {}
            recovered = {update.name: update.recovered_from for update in report.updated}
            assert recovered["server_0"]
            assert recovered["server_1"]
            assert recovered["server_2"] is None
            for server in three:
                assert_has(server, model)
