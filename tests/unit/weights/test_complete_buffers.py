"""A packed buffer is complete before another thread gets it: the streams of this one say nothing there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelinerl.weights import buffers
from pipelinerl.weights.buffers import packed_buffers
from pipelinerl.weights.nccl_transport import NCCLTransport
from pipelinerl.weights.source import ModuleSource


class OnGPU:
    """Stands for a buffer of a GPU."""

    is_cuda = True
    device = "cuda:3"

    def to(self, device: Any) -> OnGPU:
        return self


def test_the_packing_stream_is_waited_for_before_a_buffer_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            calls.append("complete")

    def pack(*_: Any) -> OnGPU:
        calls.append("pack")
        return OnGPU()

    def current_stream(device: str) -> Stream:
        assert device == "cuda:3"
        return Stream()

    monkeypatch.setattr(buffers, "pack", pack)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    source = ModuleSource(torch.nn.Linear(4, 4))
    for _ in packed_buffers(source, source.metadata(), chunk_bytes=1, pass_id=1):
        calls.append("given out")
    assert calls == ["pack", "complete", "given out"] * 2


def test_sending_does_not_wait_for_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast to another server may hang on it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waits for the whole GPU"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    sent: list[object] = []

    class Group:
        def broadcast(self, buffer: object) -> None:
            sent.append(buffer)

    transport: Any = NCCLTransport("127.0.0.1", None, 60, 1, device_index=3)
    transport._group = Group()
    buffer: Any = OnGPU()
    transport.send(buffer)
    assert sent == [buffer]
