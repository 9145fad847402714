"""Servers leave and join between updates, with a real publisher and fake servers (lines L1 and W1)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from fakes.fake_server import FakeServer, Fault
from fakes.ports import refused_port

from pipelinerl.errors import StreamError, WeightSyncError
from pipelinerl.finetune.probe import Probe
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import ServerPool, WeightSync
from pipelinerl.records import PoolChange, ServerDropped, ServerReady
from pipelinerl.streams.base import Entry
from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.link import UPDATE_PATH, ServerAddress
from pipelinerl.weights.sync import ProbeSequence, WeightPublisher

TIMEOUT_S = 60.0
WAIT_S = 60.0
SHAPES = {"weight": (3, 4), "bias": (3,)}
# What the fake servers answer for every token.
LOGPROB = -0.5


class FakeBackend:
    """Weights whose log-probs are what the fake servers say; `logprob` can be set to something else."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 3)
        self.passes = 0

    def update_source(self) -> ModuleSource:
        self.passes += 1
        return ModuleSource(self.model)


class FixedProbe(Probe):
    """The trainer's log-probs without a policy behind them."""

    def sequences(self, tokens):  # type: ignore[no-untyped-def, override]
        return [ProbeSequence(list(ids), [LOGPROB] * (len(ids) - 1)) for ids in tokens]


class Scene:
    """A trainer's rank 0 with the servers `names`, and what it announced."""

    def __init__(self, servers: dict[str, FakeServer]) -> None:
        self.servers = servers
        token = next(iter(servers.values())).token
        self.publisher = WeightPublisher(token, timeout_s=TIMEOUT_S)
        self.said: list[ServerReady | ServerDropped] = []
        self.woken = threading.Semaphore(0)
        self.heard = threading.Semaphore(0)
        self.pool = ServerPool(self.publisher, list(servers), WAIT_S, self.announce, 0, self.woken.release)
        self.pool.connect_all([ServerAddress(name, server.url) for name, server in servers.items()])
        for _ in servers:
            self.woken.acquire(timeout=WAIT_S)
        self.backend = FakeBackend()
        dtypes = {"compute_dtype": torch.float32, "served_dtype": torch.float32, "tf32": False}
        self.backend.policy = SimpleNamespace(**dtypes)
        self.feed = WeightSync(self.backend, Ranks(), self.pool, [[1, 2, 3]], return_timeout_s=WAIT_S)
        self.feed.probe = FixedProbe(self.backend, Ranks())

    def announce(self, answer: ServerReady | ServerDropped) -> None:
        self.said.append(answer)
        self.heard.release()

    def change(self, name: str, event: str, generation: int, url: str = "", incarnation: int = 0) -> None:
        record = PoolChange(
            name=name, url=url, event=event, generation=generation, time=0.0, reason="test", incarnation=incarnation
        )
        self.pool.apply(Entry(0, record))

    @property
    def ready(self) -> list[tuple[str, int, int]]:
        return [(one.name, one.generation, one.version) for one in self.said if isinstance(one, ServerReady)]

    @property
    def dropped(self) -> list[tuple[str, int]]:
        return [(one.name, one.generation) for one in self.said if isinstance(one, ServerDropped)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with FakeServer(SHAPES) as first, FakeServer(SHAPES) as second:
        made = Scene({"s0": first, "s1": second})
        yield made
        made.publisher.close()


def test_all_servers_are_ready_after_the_first_update(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert sorted(scene.pool.fresh) == ["s0", "s1"]
    with caplog.at_level("INFO"):
        delivery = scene.feed.send(0, [[1, 2]])
    # One line on both, though each is asked by itself.
    lines = [record.getMessage() for record in caplog.records if "nats" in record.getMessage()]
    assert len(lines) == 1 and "2 servers" in lines[0]
    assert sorted(scene.ready) == [("s0", 0, 0), ("s1", 0, 0)]
    assert delivery.num_servers == 2 and delivery.probe_abs_diff == pytest.approx(0)
    assert scene.pool.fresh == []


def test_a_server_that_comes_back_gets_the_present_weights_between_two_updates(scene: Scene) -> None:
    scene.feed.send(0, [[1, 2]])
    scene.servers["s0"].stop()
    scene.change("s0", "down", 0)
    assert scene.feed.send(1).num_servers == 1
    with FakeServer(SHAPES) as again:
        scene.change("s0", "up", 1, again.url)
        assert scene.woken.acquire(timeout=WAIT_S)
        assert scene.feed.has_fresh
        calls = len(scene.servers["s1"].calls)
        scene.feed.send_to_fresh(1)
        assert (again.version, again.paused) == ("1", False)
        assert torch.equal(again.tensors["weight"], scene.backend.model.weight)
        assert len(scene.servers["s1"].calls) == calls, "the other server was left alone"
        assert scene.ready[-1] == ("s0", 1, 1) and not scene.feed.has_fresh
        assert scene.feed.send(2).num_servers == 2
        assert again.version == "2"


def test_a_server_that_joins_is_part_of_the_next_update_and_probed_alone(scene: Scene) -> None:
    scene.feed.send(0, [[1, 2]])
    with FakeServer(SHAPES) as more:
        scene.change("s2", "up", 0, more.url)
        assert scene.woken.acquire(timeout=WAIT_S)
        before = len(scene.servers["s0"].requests)
        assert scene.feed.send(1).num_servers == 3
        assert scene.ready[-1] == ("s2", 0, 1)
        assert len(more.requests) == 1 and len(scene.servers["s0"].requests) == before
        scene.change("s2", "removed", 0)
        assert scene.feed.send(2).num_servers == 2
        assert more.version == "1"


@pytest.mark.parametrize("fault", [Fault("status", 500, "disk on fire"), Fault("close")], ids=lambda fault: fault.kind)
def test_l1_a_server_that_refuses_an_update_is_dropped_and_the_other_goes_on(scene: Scene, fault: Fault) -> None:
    scene.feed.send(0, [[1, 2]])
    scene.servers["s0"].inject(UPDATE_PATH, fault, fault)
    delivery = scene.feed.send(1)
    assert delivery.num_servers == 1
    assert scene.dropped == [("s0", 0)]
    (said,) = [one for one in scene.said if isinstance(one, ServerDropped)]
    assert "could not be given version 1" in said.error
    if fault.kind == "status":
        assert "disk on fire" in said.error
    assert (scene.servers["s1"].version, scene.servers["s1"].paused) == ("1", False)


def test_a_restarted_server_that_disagrees_is_dropped_and_the_run_goes_on(scene: Scene) -> None:
    scene.feed.send(0, [[1, 2]])
    scene.change("s0", "down", 0)
    with FakeServer(SHAPES, logprob=-1.5) as wrong:
        scene.change("s0", "up", 1, wrong.url)
        assert scene.woken.acquire(timeout=WAIT_S)
        scene.feed.send_to_fresh(0)
    assert scene.dropped == [("s0", 1)]
    assert ("s0", 1, 0) not in scene.ready
    assert scene.feed.send(1).num_servers == 1


def test_a_server_that_disagrees_from_the_first_is_an_error(scene: Scene) -> None:
    scene.servers["s1"]._logprob = -1.5
    with pytest.raises(WeightSyncError, match="s1"):
        scene.feed.send(0, [[1, 2]])


def test_a_server_of_another_model_is_refused_without_harm(scene: Scene) -> None:
    scene.feed.send(0, [[1, 2]])
    with FakeServer({"weight": (30, 40), "bias": (30,)}) as other:
        scene.change("s2", "up", 0, other.url)
        assert scene.woken.acquire(timeout=WAIT_S)
        assert scene.feed.send(1).num_servers == 2
    assert scene.dropped == [("s2", 0)]
    assert "does not fit" in scene.said[-1].error


def test_the_last_version_waits_for_a_server(scene: Scene) -> None:
    scene.feed.send(0, [[1, 2]])
    for name in ("s0", "s1"):
        scene.change(name, "down", 0)
    assert scene.feed.send(1).num_servers == 0
    with FakeServer(SHAPES) as again:
        timer = threading.Thread(target=scene.change, args=("s0", "up", 1, again.url))
        timer.start()
        assert scene.feed.send(2, required=True).num_servers == 1
        timer.join()
        assert again.version == "2"


def test_a_server_that_dies_while_it_starts_joins_when_it_is_started_again() -> None:
    with FakeServer(SHAPES) as first, FakeServer(SHAPES) as again, refused_port() as port:
        publisher = WeightPublisher(first.token, timeout_s=TIMEOUT_S)
        said: list[ServerReady | ServerDropped] = []
        pool = ServerPool(publisher, ["s0", "s1"], WAIT_S, said.append, 0)
        nobody = f"http://127.0.0.1:{port}"

        def restart() -> None:
            for event, generation, url in (("down", 0, nobody), ("up", 1, again.url)):
                record = PoolChange(name="s1", url=url, event=event, generation=generation, time=0.0)
                pool.apply(Entry(0, record))

        thread = threading.Thread(target=restart)
        thread.start()
        pool.connect_all([ServerAddress("s0", first.url), ServerAddress("s1", nobody)])
        thread.join()
        assert sorted(pool.fresh) == ["s0", "s1"] and pool.is_present("s0", 0) and pool.is_present("s1", 1)
        assert again.calls and said == []
        publisher.close()


def test_servers_that_do_not_come_up_are_named() -> None:
    publisher = WeightPublisher("a-token-of-sixteen", timeout_s=TIMEOUT_S)
    said: list[ServerReady | ServerDropped] = []
    pool = ServerPool(publisher, ["s0"], 0.5, said.append, 0)
    with refused_port() as port, pytest.raises(WeightSyncError, match=r"s0: not connected within 0\.5 s of the start"):
        pool.connect_all([ServerAddress("s0", f"http://127.0.0.1:{port}")])
    publisher.close()


def test_changes_of_an_older_start_are_history(scene: Scene) -> None:
    scene.change("s0", "down", 0, incarnation=7)
    assert scene.feed.send(0, [[1, 2]]).num_servers == 2


def test_a_server_that_went_away_in_mid_update_is_not_waited_for(scene: Scene) -> None:
    """The launcher hears of a server's end while the trainer waits for it: the update goes on without that server."""
    scene.feed.send(0, [[1, 2]])
    reached = threading.Event()
    server = scene.servers["s0"]
    server.inject(UPDATE_PATH, Fault("hang"))

    def end_when_reached() -> None:
        while UPDATE_PATH not in server.calls[calls:]:
            reached.wait(0.01)
        scene.change("s0", "down", 0)
        server.stop()

    calls = len(server.calls)
    thread = threading.Thread(target=end_when_reached)
    thread.start()
    delivery = scene.feed.send(1)
    thread.join()
    assert delivery.num_servers == 1 and delivery.total_s < TIMEOUT_S
    assert scene.dropped == []


def test_a_server_that_is_started_again_between_update_and_probe_is_not_blamed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(SHAPES, logprob=-2.0) as again:
        compute = scene.feed.probe.sequences

        def restart_then_compute(tokens):  # type: ignore[no-untyped-def]
            scene.change("s0", "down", 0)
            scene.change("s0", "up", 1, again.url)
            assert scene.woken.acquire(timeout=WAIT_S)
            return compute(tokens)

        monkeypatch.setattr(scene.feed.probe, "sequences", restart_then_compute)
        scene.feed.send(0, [[1, 2]])
    assert scene.ready == [("s1", 0, 0)] and scene.dropped == []
    assert scene.pool.fresh == ["s0"]


def test_a_trainer_that_cannot_hear_the_launcher_any_more_does_not_go_on(scene: Scene) -> None:
    """It would send to servers that left, and wait for those that came."""
    scene.feed.send(0, [[1, 2]])
    errors: list[str] = []

    def wait_for_a_server() -> None:
        with pytest.raises(StreamError) as caught:
            scene.pool.wait_for_fresh(WAIT_S)
        errors.append(str(caught.value))

    waiting = threading.Thread(target=wait_for_a_server, daemon=True)
    waiting.start()
    scene.pool.fail(StreamError("corrupt record"))
    waiting.join(WAIT_S)
    assert not waiting.is_alive() and len(errors) == 1 and "corrupt record" in errors[0]
    assert scene.woken.acquire(timeout=WAIT_S), "a trainer that waits for data is woken"
    for ask in (lambda: scene.feed.has_fresh, lambda: scene.feed.send(1)):
        with pytest.raises(StreamError, match="corrupt record"):
            ask()
