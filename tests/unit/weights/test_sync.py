"""Updates of fake servers: all of them get everything, a failing server costs only itself and gets a second attempt."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from fakes.fake_server import FakeServer, Fault
from fakes.ports import refused_port
from fakes.synced_servers import HANG_S, LIMIT_S, SHAPES, assert_has, assert_recovers, connected, small_model

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.link import UPDATE_PATH, ServerAddress, ServerUpdate
from pipelinerl.weights.sync import ProbeSequence, UpdateReport, WeightPublisher
from pipelinerl.weights.transport import GroupSender


@pytest.fixture
def model() -> torch.nn.Module:
    return small_model()


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(SHAPES) as first, FakeServer(SHAPES) as second:
        yield first, second


@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
def test_every_server_gets_every_tensor(servers, model, chunk_bytes: int) -> None:
    with connected(servers, chunk_bytes=chunk_bytes) as publisher:
        for version in range(3):
            with torch.no_grad():
                model[0].bias.fill_(version)
            report = publisher.publish(version, ModuleSource(model))
            assert report.failed == {}
            assert report.num_servers == 2
            assert set(report.seconds) == {"pause", "transfer", "load", "resume", "paused", "total"}
            for server in servers:
                assert_has(server, model)
                assert (server.version, server.paused) == (str(version), False)


FAULTS = [
    Fault(kind, text="disk on fire", is_late=is_late) for kind in ("status", "close") for is_late in (False, True)
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.is_late}")
def test_l1_a_server_with_one_fault_recovers(servers, model, fault) -> None:
    assert_recovers(servers, model, fault, LIMIT_S)


def test_a_server_that_fails_twice_is_reported_and_left_paused(servers, model) -> None:
    first, second = servers
    with connected(servers) as publisher:
        first.inject(UPDATE_PATH, Fault("status", 500, "first"), Fault("status", 500, "second"))
        report = publisher.publish(1, ModuleSource(model))
        assert list(report.failed) == ["server_0"]
        assert "second" in report.failed["server_0"]
        assert "first" in report.failed["server_0"]
        assert first.paused
        assert publisher.servers == ["server_1"]
        assert publisher.publish(2, ModuleSource(model)).failed == {}
        assert (second.version, second.paused) == ("2", False)


def test_a_dead_server_is_reported_in_time(servers, model) -> None:
    with FakeServer(SHAPES) as dying, connected((*servers, dying), timeout_s=HANG_S) as publisher:
        dying.stop()
        started = time.monotonic()
        report = publisher.publish(0, ModuleSource(model))
        assert time.monotonic() - started < 3 * HANG_S
        assert list(report.failed) == ["server_2"]
        assert report.num_servers == 2


def test_tensors_that_do_not_fit_are_refused_before_anything_is_paused(servers) -> None:
    smaller = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with connected(servers) as publisher:
        with pytest.raises(WeightSyncError, match=r"1 tensors are left out: 1\.weight"):
            publisher.publish(0, ModuleSource(smaller))
        assert UPDATE_PATH not in servers[0].calls


def test_l2_a_restarted_trainer_finds_a_server_in_the_middle_of_an_update(servers, model) -> None:
    first, _ = servers
    first.inject(UPDATE_PATH, Fault("close"), Fault("close"))
    with connected((first,)) as publisher:
        assert publisher.publish(0, ModuleSource(model)).failed
    assert first.paused
    with connected((first,)) as publisher:
        assert publisher.publish(7, ModuleSource(model)).failed == {}
    assert_has(first, model)
    assert (first.version, first.paused) == ("7", False)


def test_connect_quotes_a_refusal_and_names_a_server_that_never_comes_up(model) -> None:
    with FakeServer() as server, WeightPublisher(server.token, timeout_s=LIMIT_S) as publisher:
        server.inject("/get_world_size", Fault("status", 503, "still loading"))
        with pytest.raises(WeightSyncError, match="still loading"):
            publisher.connect([ServerAddress("a", server.url)])
        with refused_port() as port, pytest.raises(WeightSyncError, match=r"did not answer within 0.5 s"):
            publisher.connect([ServerAddress("b", f"http://127.0.0.1:{port}")], start_timeout_s=0.5)


def test_connect_does_not_wait_for_other_servers_once_one_refuses() -> None:
    with FakeServer() as server, WeightPublisher(server.token, timeout_s=LIMIT_S) as publisher, refused_port() as port:
        server.inject("/get_world_size", Fault("status", 503, "still loading"))
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="still loading"):
            publisher.connect(
                [ServerAddress(n, u) for n, u in (("b", f"http://127.0.0.1:{port}"), ("a", server.url))], 20
            )
        assert time.monotonic() - started < 10


def test_o4_proxies_of_the_environment_are_ignored(servers, model, monkeypatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with connected(servers) as publisher:
        assert publisher.publish(0, ModuleSource(model)).failed == {}


def test_probe_compares_with_a_server(servers) -> None:
    with connected(servers) as publisher:
        # The fake gives -0.5 for every token: differences 0.25 and 0.75, mean 0.5.
        result = publisher.probe([ProbeSequence([5, 6, 7], [-0.25, -1.25])], "server_1")
        assert (result.mean_abs_diff, result.max_abs_diff, result.num_tokens) == (0.5, 0.75, 2)
        with pytest.raises(WeightSyncError, match="server_7"):
            publisher.probe([ProbeSequence([5, 6, 7], [-0.25, -1.25])], "server_7")


def test_an_update_that_was_cut_off_leaves_its_groups_and_the_next_one_makes_new_ones(servers, model) -> None:
    class Broken(ModuleSource):
        """Fails after the first tensor, when the update is under way."""

        def buckets(self):
            yield [next(iter(next(iter(super().buckets()))))]
            raise ArithmeticError("gather failed")

    with connected(servers, chunk_bytes=1) as publisher:
        links = list(publisher._links.values())
        closed = [threading.Event() for _ in links]
        for link, event in zip(links, closed, strict=True):
            close = link._sender.close
            link._sender.close = lambda close=close, event=event: (close(), event.set())
        with pytest.raises(ArithmeticError, match="gather failed"):
            publisher.publish(0, Broken(model))
        assert all(event.wait(60) for event in closed)
        report = publisher.publish(1, ModuleSource(model))
        assert report.failed == {} and report.num_servers == 2
        for server in servers:
            assert_has(server, model)
            assert (server.version, server.paused) == ("1", False)


def test_a_link_that_does_not_end_is_cancelled_and_its_group_closed(servers) -> None:
    class Stuck(Future):
        def result(self, timeout: float | None = None) -> None:
            raise TimeoutError

    with connected(servers) as publisher:
        link, future = publisher._links["server_0"], Stuck()
        assert publisher._outcome(link, future) is None
        assert future.cancelled() and link._sender is None and "60 s" in str(link.error)


def test_a_server_that_joins_anew_while_its_old_start_fails_stays_connected(servers, model) -> None:
    joined = threading.Event()

    class Restarting(ModuleSource):
        """In the middle of the update server 0 ends, and its next start is connected."""

        def buckets(self):
            if not joined.is_set():
                publisher.drop("server_0", "down: killed by SIGKILL")
                publisher.join(ServerAddress("server_0", again.url), 60, lambda address, error: joined.set())
                assert joined.wait(60)
            yield from super().buckets()

    with FakeServer(SHAPES) as again, connected(servers) as publisher:
        report = publisher.publish(0, Restarting(model))
        assert list(report.failed) == ["server_0"]
        assert sorted(publisher.servers) == ["server_0", "server_1"]
        assert publisher.publish(1, ModuleSource(model)).failed == {}
        assert (again.version, again.paused) == ("1", False)


class Squares(torch.nn.Module):
    """Tensors of one size, so that one buffer can be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.full((2, 3), value)) for value in (1.0, 2.0, 3.0))


class DamagingWire:
    """Stands for `GroupSender.send`: the next `passes` passes of three buffers are damaged on the way."""

    def __init__(self, send: Callable[[GroupSender, torch.Tensor], None], kind: str, passes: int) -> None:
        self._send, self._kind, self._damaged = send, kind, 3 * passes
        self._earlier: list[torch.Tensor] = []
        self._held: torch.Tensor | None = None
        self.armed = False

    def __call__(self, transport: GroupSender, buffer: torch.Tensor) -> None:
        if not self.armed:
            self._earlier.append(buffer.clone())
            self._send(transport, buffer)
            return
        number, self._damaged = self._damaged % 3, self._damaged - 1
        if self._damaged < 0:
            self._send(transport, buffer)
        elif self._kind == "swapped":
            if number == 0:
                self._held = buffer
            else:
                self._send(transport, buffer)
            if number == 2 and self._held is not None:
                self._send(transport, self._held)
        elif number == 2:
            self._send(transport, self._of(buffer))
        else:
            self._send(transport, buffer)

    def _of(self, buffer: torch.Tensor) -> torch.Tensor:
        if self._kind == "zeros":
            return torch.zeros_like(buffer)
        if self._kind == "stale":
            return self._earlier[1]
        damaged = buffer.clone()
        damaged[3] ^= 64
        return damaged


@pytest.fixture(params=["zeros", "stale", "byte", "swapped"])
def damaged_wire(request, monkeypatch) -> Callable[[int], DamagingWire]:
    def make(passes: int) -> DamagingWire:
        wire = DamagingWire(GroupSender.send, request.param, passes)
        monkeypatch.setattr(GroupSender, "send", lambda transport, buffer: wire(transport, buffer))
        return wire

    return make


def test_a_damaged_buffer_fails_the_attempt_and_the_second_one_is_good(damaged_wire) -> None:
    model, wire = Squares(), damaged_wire(passes=1)
    with FakeServer() as server, connected((server,), chunk_bytes=1) as publisher:
        assert publisher.publish(0, ModuleSource(model)).failed == {}
        wire.armed = True
        # The weights are the same in both versions: a stale buffer has the right values and the wrong pass.
        report = publisher.publish(1, ModuleSource(model))
        assert report.failed == {}
        assert re.search(r"buffer [123] of 3\b", str(report.updated[0].recovered_from))
        assert_has(server, model)
        assert (server.version, server.paused) == ("1", False)


def test_adapters_and_models_are_not_taken_for_each_other() -> None:
    """A stale or another frozen model is refused before anything is paused."""
    model = {"layers.0.q_proj.weight": (6, 4), "norm.weight": (4,)}
    module = torch.nn.ModuleDict({"A": torch.nn.Linear(4, 2, bias=False), "B": torch.nn.Linear(2, 6, bias=False)})
    adapter = ModuleSource(module, rename=lambda name: f"layers.0.q_proj.lora_{name}")
    info = {"adapter_rank": 2, "base_checksum": "same"}
    for base_checksum, extra, fits in [("same", info, True), ("another", info, False), ("same", {}, False)]:
        with (
            FakeServer(model, info=extra) as server,
            WeightPublisher(server.token, timeout_s=LIMIT_S, base_checksum=base_checksum) as publisher,
        ):
            publisher.connect([ServerAddress("actor_llm_0", server.url)])
            if not fits:
                with pytest.raises(WeightSyncError, match="does not fit the server's model"):
                    publisher.publish(1, adapter)
                assert UPDATE_PATH not in server.calls and not server.tensors
                continue
            report = publisher.publish(1, adapter)
            assert (report.failed, report.sent_bytes, server.version) == ({}, 4 * (2 * 4 + 6 * 2), "1")
            assert set(server.tensors) == {f"layers.0.q_proj.lora_{matrix}.weight" for matrix in "AB"}


HALF_SHAPES = {"weight": (2, 3), "bias": (2,)}


def linear(bias: float = 0.5) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, -65504.0], [2.0**-24, 2.0**-26, 0.1]]))
        model.bias.fill_(bias)
    return model


def test_weights_are_rounded_to_the_dtype_of_the_wire_once() -> None:
    with FakeServer(HALF_SHAPES, dtype="float16") as server, connected((server,)) as publisher:
        assert publisher.publish(1, ModuleSource(linear(), dtype=torch.float16)).failed == {}
        arrived = server.tensors["weight"]
        assert arrived.dtype == torch.float16
        # Ties go to the even neighbor; below half of the smallest float16 lies 0.
        assert arrived.tolist() == [[1.0, 1 + 2 * 2**-10, -65504.0], [2.0**-24, 0.0, 0.0999755859375]]
        assert publisher.probe([ProbeSequence([1, 2], [-0.5])], "server_0").server_dtype == "float16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_value_beyond_float16_is_refused_before_a_float16_server_is_paused(dtype: str) -> None:
    with FakeServer(HALF_SHAPES, dtype=dtype) as server, connected((server,)) as publisher:
        if dtype == "float16":
            with pytest.raises(WeightSyncError, match="bias has a value of 70000"):
                publisher.publish(1, ModuleSource(linear(70000.0)))
            assert (server.version, server.paused, server.tensors) == ("default", False, {})
        else:
            assert publisher.publish(1, ModuleSource(linear(70000.0))).failed == {}
            assert float(server.tensors["bias"][0]) == 70000.0


def report(
    *servers: dict[str, float], failed: dict[str, str] | None = None, recovered: str | None = None
) -> UpdateReport:
    updates = [ServerUpdate(f"s{number}", seconds, recovered) for number, seconds in enumerate(servers)]
    return UpdateReport(1, updates, failed or {}, total_s=0.5)


def test_a_server_is_paused_in_its_own_phases() -> None:
    seconds = report({"pause": 0.01, "transfer": 0.2, "resume": 0.01}, {"pause": 0.1, "transfer": 0.05}).seconds
    # 0.22 and 0.15: not 0.1 + 0.2 + 0.01, which no server was paused.
    assert seconds["paused"] == pytest.approx(0.22)
    assert (seconds["pause"], seconds["transfer"], seconds["total"]) == (0.1, 0.2, 0.5)


@pytest.mark.parametrize("how", ["recovered", "failed"])
def test_after_a_failed_attempt_the_whole_call_counts(how: str) -> None:
    phases = {"pause": 0.01, "transfer": 0.2}
    found = report(phases, recovered="first error") if how == "recovered" else report(phases, failed={"s1": "gone"})
    assert found.seconds["paused"] == 0.5
