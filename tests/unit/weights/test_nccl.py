"""The NCCL group's own part on a CPU: real gloo carries the bytes, so that only NCCL itself is missing."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from pipelinerl.weights import transport
from pipelinerl.weights.transport import (
    NCCLGroup,
    SenderOptions,
    find_store,
    open_receiver,
    open_sender,
    serve_store,
)

CPU = torch.device("cpu")
VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"


class Stream:
    """A stream that notes what it was made to wait for; a CPU itself has nothing to wait for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        """All is done."""


DEFAULT_STREAM = Stream()
current = threading.local()


def current_stream(device: torch.device | None = None) -> Stream:
    return getattr(current, "stream", DEFAULT_STREAM)


@contextlib.contextmanager
def within(stream: Stream) -> Iterator[None]:
    before, current.stream = current_stream(), stream
    try:
        yield
    finally:
        current.stream = before


class Mute:
    """A group whose broadcasts end at once and carry nothing."""

    def __init__(self) -> None:
        self.aborted = False

    def broadcast(self, buffer: torch.Tensor, root: int, timeout: Any) -> Mute:
        return self

    def wait(self, timeout: Any) -> None:
        """Makes the current stream wait, as the work of NCCL does, and returns at once."""
        current_stream().waited_for.append(self)

    def is_completed(self) -> bool:
        return True

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def gloo(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return ProcessGroupGloo(store, rank, world_size, options)

    monkeypatch.setattr(transport, "_process_group", gloo)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(DEFAULT_STREAM, "waited_for", [])
    yield


def both_ends(timeout_s: float = 60) -> dict[str, Any]:
    """The trainer's and a worker's group, or the errors with which they did not form."""
    store, port = serve_store("127.0.0.1", None, 2, timeout_s)
    found: dict[str, Any] = {"store": store}
    details = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "timeout_s": timeout_s}

    def run(name: str, form: Any) -> None:
        try:
            found[name] = form()
        except RuntimeError as error:
            found[name] = error

    ends = {
        "trainer": lambda: NCCLGroup(store, 0, 2, timeout_s, CPU),
        "worker": lambda: NCCLGroup(find_store(details), 1, 2, timeout_s, CPU),
    }
    threads = [threading.Thread(target=run, args=item) for item in ends.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return found


def test_a_buffer_arrives_and_a_closed_group_refuses() -> None:
    ends = both_ends()
    sent, received = torch.arange(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    sender = threading.Thread(target=ends["trainer"].broadcast, args=(sent,))
    sender.start()
    ends["worker"].broadcast(received)
    sender.join(60)
    assert torch.equal(received, sent)
    for name in ("trainer", "worker"):
        ends[name].close()
        ends[name].close()
        with pytest.raises(RuntimeError, match="closed"):
            ends[name].broadcast(sent)


def test_the_two_ends_of_the_transport_meet_in_such_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_gpu", lambda index: CPU)
    sender: Any = open_sender(SenderOptions("nccl", "127.0.0.1", None, 60, 0))
    details = sender.prepare(1)
    joining = threading.Thread(target=sender.join)
    joining.start()
    receiver: Any = open_receiver(details, 0, CPU)
    joining.join(60)
    assert type(sender._group) is type(receiver._group) is NCCLGroup
    buffer = torch.arange(7, dtype=torch.uint8)
    sending = threading.Thread(target=sender.send, args=(buffer,))
    sending.start()
    assert torch.equal(receiver.receive(7), buffer)
    sending.join(60)
    sender.close()
    receiver.close()


def test_memory_of_a_broadcast_that_failed_is_kept_until_the_group_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be written to: nobody else may get it before."""
    group = both_ends()["worker"]
    group.close()
    group._group = mute = Mute()
    monkeypatch.setattr(Mute, "is_completed", lambda self: False)
    buffer = torch.zeros(3)
    kept = weakref.ref(buffer)
    with pytest.raises(RuntimeError, match="did not end"):
        group.broadcast(buffer)
    alive: list[bool] = []

    def abort() -> None:
        gc.collect()
        alive.append(kept() is not None)

    monkeypatch.setattr(mute, "abort", abort)
    del buffer
    group.close()
    assert alive == [True]


def test_a_group_that_carries_nothing_is_found_when_it_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    mute = Mute()
    monkeypatch.setattr(transport, "_process_group", lambda *args: mute)
    ends = both_ends()
    assert "0 arrived where" in str(ends["worker"])
    assert mute.aborted


def test_only_the_stream_of_the_group_waits_for_its_broadcasts() -> None:
    """On the default stream a server that hangs would hold up the packing of buffers and all other servers."""
    group = both_ends()["trainer"]
    group.close()
    group._group = mute = Mute()
    packed_on = Stream()
    with within(packed_on):
        group.broadcast(torch.zeros(1))
    assert group._stream.waited_for[-2:] == [packed_on, mute]
    assert packed_on.waited_for == DEFAULT_STREAM.waited_for == []


def test_ranks_that_never_come_are_an_error_before_nccl_would_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_process_group", lambda *args: pytest.fail("NCCL has no time-out"))
    store, port = serve_store("127.0.0.1", None, 3, 60)
    errors: list[str] = []

    def worker() -> None:
        seen = TCPStore("127.0.0.1", port, 3, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
        try:
            NCCLGroup(seen, 1, 3, 0.5, CPU)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=worker)
    thread.start()
    with pytest.raises(RuntimeError, match=r"rank 0 of 3 waited 0\.5 s for the others"):
        NCCLGroup(store, 0, 3, 0.5, CPU)
    thread.join(60)
    assert len(errors) == 1
    assert "rank 1 of 3 waited" in errors[0]


def test_a_broadcast_whose_group_is_closed_meanwhile_has_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was aborted has ended, so that nothing else tells it from one that did its work."""
    group = both_ends()["trainer"]
    group.close()
    group._group = mute = Mute()
    monkeypatch.setattr(mute, "wait", lambda timeout: group.close())
    with pytest.raises(RuntimeError, match="closed during a broadcast"):
        group.broadcast(torch.zeros(1))
    assert mute.aborted


def test_closing_raises_nothing_and_does_not_wait_for_nccl_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called where another error is being told, and on the event loop that serves all servers."""
    monkeypatch.setattr(transport, "_CLOSE_S", 0.01)
    group = both_ends()["trainer"]
    group.close()
    is_over, broken, stuck = threading.Event(), Mute(), Mute()

    def refuse() -> None:
        raise RuntimeError("unhandled system error")

    monkeypatch.setattr(broken, "abort", refuse)
    monkeypatch.setattr(stuck, "abort", lambda: is_over.wait(60))
    transport._abort(broken, None)
    assert "unhandled system error" in caplog.text
    group._group = stuck
    group.close()
    assert "continues in the background" in caplog.text
    is_over.set()
