"""An update in one call: the route inside a server, and the publisher against servers that fail in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.fake_server import FakeServer, Fault

from pipelinerl.inference.update_route import UPDATE_PATH, UpdateRoute
from pipelinerl.weights.publisher import WeightPublisher
from pipelinerl.weights.report import ServerAddress
from pipelinerl.weights.source import ModuleSource

SHAPES = {"0.weight": (3, 4), "0.bias": (3,)}
BODY = {"update_info": {"names": []}, "weight_version": "4", "clear_cache": False, "limit_s": 60}


class FakeEngine:
    """Notes what it is asked to do; `fail` names the step that raises, `held` the one that waits for `go_on`."""

    def __init__(self, fail: str = "", held: str = "") -> None:
        self.calls: list[str] = []
        self.go_on = asyncio.Event()
        self.reached = asyncio.Event()
        self._fail, self._held = fail, held
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._step("clear"))
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.update_weight_version = self._step("version")
        self.resume_generation = self._step("resume")

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        await self._step(f"pause {mode} {clear_cache}")()

    async def wake_up(self, tags: list[str]) -> None:
        await self._step(f"wake {tags[0]}")()

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[dict[str, float]]:
        await self._step(method)()
        return [{"start": 0.1, "transfer": 0.2, "load": 0.3}, {"start": 0.4, "transfer": 0.1, "load": 0.2}]

    def _step(self, name: str) -> Callable[..., Any]:
        async def step(*_: Any) -> None:
            self.calls.append(name)
            if name == self._held:
                self.reached.set()
                await self.go_on.wait()
            if name == self._fail:
                raise RuntimeError("disk on fire")

        return step


async def call(route: UpdateRoute, engine: FakeEngine, body: Any, path: str = UPDATE_PATH) -> tuple[int, Any]:
    sent: list[Any] = []
    data = json.dumps(body).encode()
    parts = iter(
        [
            {"type": "http.request", "body": data[:5], "more_body": True},
            {"type": "http.request", "body": data[5:], "more_body": False},
        ]
    )

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    await route({"type": "http", "path": path, "method": "POST", "app": app}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def test_the_phases_come_in_order_and_are_measured_apart() -> None:
    engine = FakeEngine()
    status, answer = await call(UpdateRoute(inner), engine, BODY)
    assert status == 200
    assert engine.calls == ["pause keep False", "pipelinerl_whole_update", "version", "resume"]
    seconds = answer["seconds"]
    assert set(seconds) == {"pause", "start", "transfer", "load", "resume"}
    assert (seconds["start"], seconds["transfer"]) == (0.4, 0.2), "the slowest worker counts"
    assert seconds["load"] >= 0.3


async def test_a_sleeping_server_wakes_in_two_parts_and_recompute_clears_the_cache() -> None:
    engine = FakeEngine()
    await call(UpdateRoute(inner), engine, {**BODY, "wakes": True, "clear_cache": True})
    before = ["wake weights", "clear", "pause keep True"]
    assert engine.calls == [*before, "pipelinerl_whole_update", "version", "wake kv_cache", "resume"]


@pytest.mark.parametrize(
    ("step", "phase"),
    [("pause keep False", "pause"), ("pipelinerl_whole_update", "transfer"), ("version", "load"), ("resume", "resume")],
)
async def test_l1_a_failure_is_quoted_with_its_phase_and_nothing_is_resumed(step: str, phase: str) -> None:
    engine = FakeEngine(fail=step)
    status, answer = await call(UpdateRoute(inner), engine, BODY)
    assert status == 500
    assert answer["error"] == {"message": f"{phase}: RuntimeError: disk on fire", "phase": phase}
    assert engine.calls[-1] == step, "it stays paused"


async def test_an_update_that_is_late_leaves_the_server_paused() -> None:
    engine = FakeEngine(held="pipelinerl_whole_update")
    status, answer = await call(UpdateRoute(inner), engine, {**BODY, "limit_s": 0.01})
    assert status == 500 and answer["error"]["phase"] == "transfer"
    assert "resume" not in engine.calls


async def test_one_update_at_a_time() -> None:
    """The second one pauses only after the first has ended: whatever the first does, it cannot resume in the second."""
    route = UpdateRoute(inner)
    first, second = FakeEngine(held="version"), FakeEngine()
    one = asyncio.create_task(call(route, first, BODY))
    await asyncio.wait_for(first.reached.wait(), 60)
    two = asyncio.create_task(call(route, second, BODY))
    for _ in range(10):
        await asyncio.sleep(0)
    assert second.calls == []
    first.go_on.set()
    assert [status for status, _ in await asyncio.gather(one, two)] == [200, 200]


@pytest.mark.parametrize("body", [{}, {**BODY, "limit_s": "soon"}, {**BODY, "update_info": 7}, [1]])
async def test_a_bad_call_is_the_callers_fault_and_touches_nothing(body: Any) -> None:
    engine = FakeEngine()
    assert (await call(UpdateRoute(inner), engine, body))[0] == 400
    assert engine.calls == []


async def test_other_paths_are_handed_on() -> None:
    assert (await call(UpdateRoute(inner), FakeEngine(), BODY, path="/pause"))[0] == 418


# Only the server that hangs is waited for so long; whatever works has to be quicker.
HANG_S = 6.0
LIMIT_S = 60.0
FAULTS = [Fault("status", 500, "disk on fire"), Fault("close"), Fault("hang")]


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3))


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(SHAPES, whole_update=True) as first, FakeServer(SHAPES, whole_update=True) as second:
        yield first, second


def connected(servers: tuple[FakeServer, ...], timeout_s: float = LIMIT_S) -> WeightPublisher:
    publisher = WeightPublisher(servers[0].token, timeout_s=timeout_s, chunk_bytes=40)
    addresses = [ServerAddress(f"server_{index}", server.url) for index, server in enumerate(servers)]
    publisher.connect(addresses, start_timeout_s=LIMIT_S)
    return publisher


def assert_has(server: FakeServer, model: torch.nn.Module, version: int) -> None:
    assert all(torch.equal(server.tensors[name], parameter) for name, parameter in model.named_parameters())
    assert (server.version, server.paused) == (str(version), False)


def test_servers_that_can_take_it_get_one_call_and_the_others_five(model: torch.nn.Module) -> None:
    with FakeServer(SHAPES, whole_update=True) as new, FakeServer(SHAPES) as old, connected((new, old)) as publisher:
        report = publisher.publish(1, ModuleSource(model))
        assert report.failed == {}
        assert set(report.seconds) == {"pause", "start", "transfer", "load", "resume", "paused", "total"}
        assert "/pipelinerl/update" in new.calls and "/pause" not in new.calls
        assert "/pipelinerl/update" not in old.calls and "/pause" in old.calls
        for server in (new, old):
            assert_has(server, model, 1)


def test_the_phases_can_be_asked_for_one_by_one(servers, model) -> None:
    first, _ = servers
    with WeightPublisher(first.token, timeout_s=LIMIT_S, one_call=False) as publisher:
        publisher.connect([ServerAddress("first", first.url)])
        assert publisher.publish(2, ModuleSource(model)).failed == {}
    assert "/pipelinerl/update" not in first.calls
    assert_has(first, model, 2)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_l1_one_fault_is_mended_and_the_other_server_does_not_wait(servers, model, fault: Fault) -> None:
    first, second = servers
    with connected(servers, HANG_S if fault.kind == "hang" else LIMIT_S) as publisher:
        publisher.publish(0, ModuleSource(model))
        first.inject("/pipelinerl/update", fault)
        report = publisher.publish(1, ModuleSource(model))
        assert report.failed == {}
        recovered = {update.name: update.recovered_from for update in report.updated}
        assert recovered["server_1"] is None and recovered["server_0"] is not None
        if fault.kind == "status":
            assert "disk on fire" in recovered["server_0"]
        for server in (first, second):
            assert_has(server, model, 1)


def test_l2_a_server_that_fails_twice_waits_paused_for_the_next_trainer(servers, model) -> None:
    first, _ = servers
    with connected(servers) as publisher:
        first.inject("/pipelinerl/update", Fault("status", 500, "first"), Fault("status", 500, "second"))
        report = publisher.publish(1, ModuleSource(model))
        assert list(report.failed) == ["server_0"]
        assert "first" in report.failed["server_0"] and "second" in report.failed["server_0"]
        assert publisher.servers == ["server_1"]
    with connected((first,)) as publisher:
        assert publisher.publish(7, ModuleSource(model)).failed == {}
    assert_has(first, model, 7)
