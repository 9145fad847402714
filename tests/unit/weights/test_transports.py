"""The two ends of every transport: what arrives is what was sent, and closing one end frees the other."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipelinerl.weights import ipc
from pipelinerl.weights.ipc import HandleReceiver, HandleSender, copy_of_buffer, export_buffer, place_of, release_buffer
from pipelinerl.weights.sync import WeightPublisher
from pipelinerl.weights.transport import (
    GroupSender,
    Receiver,
    Sender,
    SenderOptions,
    open_receiver,
    open_sender,
)
from pipelinerl.world.jobs import GPU_TRANSPORT, TRANSPORTS

CPU = torch.device("cpu")
LIMIT_S = 60.0
#: NCCL needs GPUs (see test_nccl.py and tests/gpu).
ON_CPU = [name for name in TRANSPORTS if name != GPU_TRANSPORT]


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run `call` in a thread; the returned function waits for it, and returns or raises what it did."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as error:  # noqa: BLE001 - raised again below
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(LIMIT_S)
        assert result, "it did not end"
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    return wait


def options(name: str, port: int | None = None, timeout_s: float = LIMIT_S, gpu: int | None = None) -> SenderOptions:
    return SenderOptions(name, "127.0.0.1", port, timeout_s, gpu)


def port_of(details: dict[str, Any]) -> int:
    """Where the trainer's end listens."""
    ports = [value for key, value in details.items() if key in ("port", "master_port")]
    if not ports:
        pytest.skip("it does not listen")
    return int(ports[0])


def opened(name: str, workers: int = 1) -> tuple[Sender, list[Receiver]]:
    sender = open_sender(options(name))
    details = json.loads(json.dumps(sender.prepare(workers)))
    joined = in_background(sender.join)
    joining = [in_background(lambda worker=worker: open_receiver(details, worker, CPU)) for worker in range(workers)]
    receivers = [wait() for wait in joining]
    joined()
    return sender, receivers


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_gets_every_buffer(name: str, workers: int) -> None:
    sender, receivers = opened(name, workers)
    for value in range(3):
        buffer = torch.full((10 + value,), value, dtype=torch.uint8)
        sent = in_background(functools.partial(sender.send, buffer))
        waits = [in_background(functools.partial(receiver.receive, len(buffer))) for receiver in receivers]
        assert all(torch.equal(wait(), buffer) for wait in waits)
        sent()
    sender.close()
    sender.close()


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_l1_an_end_that_goes_away_frees_the_other_one(name: str, closer: str) -> None:
    sender, (receiver,) = opened(name)
    if closer == "sender":
        waiting = in_background(lambda: receiver.receive(4))
        sender.close()
    else:
        waiting = in_background(lambda: sender.send(torch.zeros(4, dtype=torch.uint8)))
        receiver.close()
    with pytest.raises(RuntimeError):
        waiting()


@pytest.mark.parametrize("name", ON_CPU)
def test_a_server_that_joins_again_does_not_wait_for_the_port_of_its_broken_group(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        planned = held.getsockname()[1]
        sender = open_sender(options(name, planned))
        port = port_of(sender.prepare(num_workers=1))
        assert port != planned
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass
        sender.close()


def test_what_a_worker_could_not_read_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, (receiver,) = opened("ipc")

    def refuse(*_: object) -> None:
        raise ValueError("no such memory")

    monkeypatch.setattr(ipc, "copy_of_buffer", refuse)
    sent = in_background(lambda: sender.send(torch.zeros(4, dtype=torch.uint8)))
    for ended in (lambda: receiver.receive(4), sent):
        with pytest.raises(RuntimeError, match="no such memory"):
            ended()
    sender.close()


def test_a_caller_without_the_secret_is_turned_away() -> None:
    sender = HandleSender(options("ipc"))
    details = sender.prepare(1)
    joined = in_background(sender.join)
    for shown in (
        b'{"secret": "guess"}\n',
        b"not json\n",
        b"[1]\n",
        b'{"secret": "\\ud800"}\n',
        b'{"secret": "\xff"}\n',
    ):
        with socket.create_connection(("127.0.0.1", details["port"]), LIMIT_S) as stranger:
            stranger.sendall(shown)
            assert stranger.recv(100) == b""
    HandleReceiver(details["port"], details["secret"], LIMIT_S, CPU)
    joined()
    sender.close()


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("said", [b"", b'{"se', b"\x00\xff" * 500])
def test_callers_who_say_nothing_or_nonsense_keep_no_worker_out(name: str, said: bytes) -> None:
    sender = open_sender(options(name))
    details = sender.prepare(1)
    strangers = [socket.create_connection(("127.0.0.1", port_of(details)), LIMIT_S) for _ in range(8)]
    for stranger in strangers:
        stranger.sendall(said)
    joined = in_background(sender.join)
    open_receiver(details, 0, CPU).close()
    joined()
    sender.close()
    for stranger in strangers:
        stranger.close()


def test_closing_ends_a_wait_for_workers() -> None:
    sender = HandleSender(options("ipc"))
    sender.prepare(1)
    joined = in_background(sender.join)
    sender.close()
    with pytest.raises(RuntimeError, match="0 of 1 workers"):
        joined()


def test_a_handle_of_another_device_is_refused() -> None:
    handle = export_buffer(torch.arange(5, dtype=torch.uint8))
    assert copy_of_buffer(handle, CPU).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="got kind 'file' for cuda:0"):
        copy_of_buffer(handle, torch.device("cuda", 0))
    with pytest.raises(ValueError, match="got kind None"):
        copy_of_buffer({}, CPU)
    release_buffer(handle)
    with pytest.raises(RuntimeError):
        copy_of_buffer(handle, CPU)


def test_a_worker_opens_a_buffer_on_the_gpu_that_holds_it() -> None:
    """Worker 1 of a parallel server copies from the trainer's GPU, whatever number that has in either process."""
    seen = ["GPU-b", "GPU-a"]
    assert place_of("GPU-b", seen, own=1) == 0
    assert place_of("GPU-a", seen, own=1) == 1
    assert place_of("GPU-c", seen, own=1) == 1
    assert place_of(None, seen, own=1) == 1


class Group:
    """Refuses once it is closed, as the groups do."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def broadcast(self, buffer: object) -> None:
        if self.closed:
            raise RuntimeError("it was closed")


class Buffer:
    """It closes the sender while it is moved to the sender's device."""

    is_cuda = False

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def to(self, device: object) -> Buffer:
        self._sender.close()
        return self


@pytest.mark.parametrize("name", ["gloo", "nccl"])
def test_a_group_that_is_closed_while_a_buffer_is_prepared_fails_as_a_link_expects(name: str) -> None:
    """Anything but a RuntimeError or an OSError would end the trainer instead of the one link."""
    sender: Any = open_sender(options(name, gpu=0))
    assert isinstance(sender, GroupSender)
    sender._group = Group()
    with pytest.raises(RuntimeError, match="closed"):
        sender.send(Buffer(sender))


def test_sending_does_not_wait_for_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast to another server may hang on it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waits for the whole GPU"))
    sender: Any = open_sender(options("nccl", gpu=3))
    sent: list[object] = []
    monkeypatch.setattr(Group, "broadcast", lambda self, buffer: sent.append(buffer))
    sender._group = Group()
    sender.send(_OnGPU())
    assert sent == ["cuda:3"]


class _OnGPU:
    """Stands for a buffer of a GPU; it becomes the name of the device that it is sent from."""

    is_cuda = True

    def to(self, device: torch.device) -> str:
        return str(device)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="'pigeon'"):
        open_receiver({"transport": "pigeon"}, 0, CPU)
    with pytest.raises(ValueError, match="'pigeon'"):
        WeightPublisher("token", transport="pigeon")
