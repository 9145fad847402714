"""Fake servers of one small model and a publisher that is connected with them."""

from __future__ import annotations

import time

import torch
from fakes.fake_server import FakeServer, Fault

from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.link import UPDATE_PATH, ServerAddress
from pipelinerl.weights.sync import WeightPublisher

# Only a server that hangs is waited for so long; whatever works has to be quicker.
HANG_S = 4.0
LIMIT_S = 60.0
SHAPES = {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (5, 3)}


def small_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5, bias=False))


def connected(servers: tuple[FakeServer, ...], chunk_bytes: int = 2**20, timeout_s: float = LIMIT_S) -> WeightPublisher:
    publisher = WeightPublisher(servers[0].token, timeout_s=timeout_s, chunk_bytes=chunk_bytes)
    addresses = [ServerAddress(f"server_{index}", server.url) for index, server in enumerate(servers)]
    publisher.connect(addresses, start_timeout_s=LIMIT_S)
    return publisher


def assert_has(server: FakeServer, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(server.tensors[name], parameter), name


def assert_recovers(servers: tuple[FakeServer, ...], model: torch.nn.Module, fault: Fault, timeout_s: float) -> None:
    """The first server has `fault` in one update, which both have in the end."""
    first, second = servers
    with connected(servers, timeout_s=timeout_s) as publisher:
        publisher.publish(0, ModuleSource(model))
        first.inject(UPDATE_PATH, fault)
        started = time.monotonic()
        report = publisher.publish(1, ModuleSource(model))
        assert time.monotonic() - started < 3 * timeout_s
        assert report.failed == {}
        recovered = {update.name: update.recovered_from for update in report.updated}
        assert recovered["server_1"] is None
        assert recovered["server_0"] is not None
        if fault.kind == "status":
            assert "disk on fire" in recovered["server_0"]
        for server in (first, second):
            assert_has(server, model)
            assert (server.version, server.paused) == ("1", False)
