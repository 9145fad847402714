"""Handles over the loopback channel: what arrives is what was sent, and nobody without the secret gets any."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.weights.handle_channel import HandleReceiver, HandleSender
from pipelinerl.weights.handles import copy_of_buffer, export_buffer, place_of, release_buffer
from pipelinerl.weights.ipc_transport import IPCTransport
from pipelinerl.weights.transport import create_transport

CPU = torch.device("cpu")
LIMIT_S = 60.0


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


def opened() -> tuple[IPCTransport, HandleReceiver]:
    transport = create_transport("ipc", "127.0.0.1", None, LIMIT_S, chunk_bytes=1024)
    assert isinstance(transport, IPCTransport)
    info = transport.prepare(1)
    joined = in_background(transport.join)
    receiver = HandleReceiver(info["port"], info["secret"], info["timeout_s"])
    joined()
    return transport, receiver


def test_a_worker_copies_each_buffer_before_it_is_taken_back() -> None:
    transport, receiver = opened()
    copies = []
    for value in range(3):
        buffer = torch.full((10 + value,), value, dtype=torch.uint8)
        sent = in_background(lambda buffer=buffer: transport.send(buffer))
        handle = receiver.take()
        copies.append(copy_of_buffer(handle, CPU))
        receiver.done()
        sent()
        assert not Path(handle["path"]).exists()
        assert json.loads(json.dumps(handle)) == handle
    assert [copy.tolist() for copy in copies] == [[0] * 10, [1] * 11, [2] * 12]
    transport.close()


def test_what_a_worker_could_not_read_is_quoted() -> None:
    transport, receiver = opened()
    sent = in_background(lambda: transport.send(torch.zeros(4, dtype=torch.uint8)))
    receiver.take()
    receiver.fail("no such memory")
    with pytest.raises(RuntimeError, match="a worker could not read the buffer: no such memory"):
        sent()
    transport.close()


def test_a_caller_without_the_secret_is_turned_away_and_keeps_nobody_out() -> None:
    sender = HandleSender(None, LIMIT_S)
    accepted = in_background(lambda: sender.accept(1))
    for shown in (b'{"secret": "guess"}\n', b"not json\n", b"[1]\n"):
        with socket.create_connection(("127.0.0.1", sender.port), LIMIT_S) as stranger:
            stranger.sendall(shown)
            assert stranger.recv(100) == b""
    receiver = HandleReceiver(sender.port, sender.secret, LIMIT_S)
    accepted()
    sender.close()
    with pytest.raises(RuntimeError, match="handle channel"):
        receiver.take()


@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_an_end_that_goes_away_frees_the_other_one(closer: str) -> None:
    transport, receiver = opened()
    if closer == "sender":
        waiting = in_background(receiver.take)
        transport.close()
        transport.close()
    else:
        waiting = in_background(lambda: transport.send(torch.zeros(4, dtype=torch.uint8)))
        receiver.take()
        receiver.close()
    with pytest.raises(RuntimeError, match="handle channel"):
        waiting()


def test_closing_ends_a_wait_for_workers() -> None:
    transport = IPCTransport(None, LIMIT_S, 1024)
    transport.prepare(1)
    joined = in_background(transport.join)
    transport.close()
    with pytest.raises(RuntimeError, match="0 of 1 workers came"):
        joined()


def test_workers_that_do_not_come_are_counted() -> None:
    sender = HandleSender(None, timeout_s=0.01)
    with pytest.raises(RuntimeError, match="0 of 2 workers came"):
        sender.accept(2)


def test_a_handle_of_another_device_is_refused(tmp_path: Path) -> None:
    handle = export_buffer(torch.arange(5, dtype=torch.uint8), tmp_path)
    assert copy_of_buffer(handle, CPU).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="got kind 'file' for cuda:0"):
        copy_of_buffer(handle, torch.device("cuda", 0))
    with pytest.raises(ValueError, match="got kind None"):
        copy_of_buffer({}, CPU)
    release_buffer(handle)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_opens_a_buffer_on_the_gpu_that_holds_it() -> None:
    """Worker 1 of a parallel server copies from the trainer's GPU, whatever number that has in either process."""
    seen = ["GPU-b", "GPU-a"]
    assert place_of("GPU-b", seen, own=1) == 0
    assert place_of("GPU-a", seen, own=1) == 1
    assert place_of("GPU-c", seen, own=1) == 1
    assert place_of(None, seen, own=1) == 1
