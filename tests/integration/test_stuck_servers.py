"""Servers that never answer in an update: they get a second attempt and hold up nobody else (line L1)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes.fake_server import FakeServer, Fault

from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.source import ModuleSource
from pipelinerl.weights.sync import WeightPublisher

# Only the server that hangs is waited for so long; whatever works has to be quicker.
HANG_S = 4.0
LIMIT_S = 60.0
SHAPES = {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (5, 3)}
ROUTES = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5, bias=False))


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(SHAPES) as first, FakeServer(SHAPES) as second:
        yield first, second


def connected(servers: tuple[FakeServer, ...], chunk_bytes: int = 2**20, timeout_s: float = LIMIT_S) -> WeightPublisher:
    publisher = WeightPublisher(servers[0].token, timeout_s=timeout_s, chunk_bytes=chunk_bytes)
    addresses = [ServerAddress(f"server_{index}", server.url) for index, server in enumerate(servers)]
    publisher.connect(addresses, start_timeout_s=LIMIT_S)
    return publisher


def assert_has(server: FakeServer, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(server.tensors[name], parameter), name


def assert_recovers(servers, model, route: str, fault: Fault, timeout_s: float) -> None:
    """The first server has `fault` on `route` in one update, which both have in the end."""
    first, second = servers
    with connected(servers, timeout_s=timeout_s) as publisher:
        publisher.publish(0, ModuleSource(model))
        first.inject(route, fault)
        started = time.monotonic()
        report = publisher.publish(1, ModuleSource(model))
        assert time.monotonic() - started < 3 * timeout_s, route
        assert report.failed == {}, route
        recovered = {update.name: update.recovered_from for update in report.updated}
        assert recovered["server_1"] is None, route
        assert recovered["server_0"] is not None, route
        if fault.kind == "status":
            assert "disk on fire" in recovered["server_0"]
        for server in (first, second):
            assert_has(server, model)
            assert (server.version, server.paused) == ("1", False), route


def test_l1_a_server_that_hangs_recovers_and_the_other_one_is_not_held_up(model) -> None:
    """On every route: one pair of servers for each, all at the same time."""

    def hang(route: str) -> None:
        with FakeServer(SHAPES) as first, FakeServer(SHAPES) as second:
            assert_recovers((first, second), model, route, Fault("hang"), HANG_S)

    with ThreadPoolExecutor(len(ROUTES)) as pool:
        for ended in [pool.submit(hang, route) for route in ROUTES]:
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
                server.inject("/update_weights", Fault("hang"))
            # Three buffers and the end of them are one more than may wait or be on the way.
            report = publisher.publish(1, ModuleSource(model))
            assert report.failed == {}
            recovered = {update.name: update.recovered_from for update in report.updated}
            assert recovered["server_0"]
            assert recovered["server_1"]
            assert recovered["server_2"] is None
            for server in three:
                assert_has(server, model)
