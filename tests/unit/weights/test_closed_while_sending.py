"""A server that is dropped closes its transport from another thread: what is being sent then fails as a link expects.

Anything but a RuntimeError or an OSError would end the trainer instead of the one link.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.weights import ipc_transport
from pipelinerl.weights.gloo_transport import GlooTransport
from pipelinerl.weights.handles import export_buffer
from pipelinerl.weights.ipc_transport import IPCTransport
from pipelinerl.weights.nccl_transport import NCCLTransport


class Group:
    """Refuses once it is closed, as the groups do."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def broadcast(self, buffer: object) -> None:
        if self.closed:
            raise RuntimeError("it was closed")


class Buffer:
    """Whoever prepares it for sending closes the transport."""

    is_cuda = False

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def cpu(self) -> Buffer:
        self._transport.close()
        return self

    def to(self, device: object) -> Buffer:
        return self.cpu()


def test_gloo() -> None:
    transport: Any = GlooTransport("127.0.0.1", None, 60, 1)
    transport._group = Group()
    with pytest.raises(RuntimeError, match="closed"):
        transport.send(Buffer(transport))


def test_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = NCCLTransport("127.0.0.1", None, 60, 1, device_index=0)
    transport._group = Group()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: transport.close())
    with pytest.raises(RuntimeError, match="closed"):
        transport.send(Buffer(transport))


def test_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = IPCTransport(None, 60, 1)
    transport.prepare(0)
    worker = _Closed()
    sender: Any = transport._sender
    sender._workers.append(worker)

    def export(*_: object) -> dict[str, str]:
        transport.close()
        return {"kind": "cuda"}

    monkeypatch.setattr(ipc_transport, "export_buffer", export)
    with pytest.raises(OSError, match="closed"):
        transport.send(torch.zeros(1))


class _Closed:
    """A worker's connection that was closed."""

    def close(self) -> None:
        """It is."""

    def send(self, message: object) -> None:
        raise OSError("closed")


def test_ipc_keeps_its_folder_while_a_buffer_is_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the buffer that is on its way to the disk, and does not trip over it."""
    transport = IPCTransport(None, 60, 1024)
    transport.prepare(1)
    exporting, closing = threading.Event(), threading.Event()
    export = export_buffer

    def slow_export(buffer: torch.Tensor, folder: Path) -> Any:
        exporting.set()
        assert closing.wait(60)
        return export(buffer, folder)

    monkeypatch.setattr(ipc_transport, "export_buffer", slow_export)
    sender: Any = transport._sender
    close_sender = sender.close

    def close_and_tell() -> None:
        close_sender()
        closing.set()

    monkeypatch.setattr(sender, "close", close_and_tell)
    monkeypatch.setattr(sender, "offer", refused)
    failures: list[Exception] = []

    def send() -> None:
        try:
            transport.send(torch.zeros(8, dtype=torch.uint8))
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert exporting.wait(60)
    transport.close()
    thread.join(60)
    assert not thread.is_alive() and [str(error) for error in failures] == ["it was closed"]
    assert not Path(transport._folder.name).exists()


def refused(handle: object) -> None:
    raise RuntimeError("it was closed")
