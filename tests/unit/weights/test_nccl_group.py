"""The NCCL group's own part on a CPU: real gloo carries the bytes, so that only NCCL itself is missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from pipelinerl.weights import nccl_group
from pipelinerl.weights.meeting_store import serve_store
from pipelinerl.weights.nccl_group import NCCLGroup

CPU = torch.device("cpu")
VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"


class Stream:
    def synchronize(self) -> None:
        """A CPU has nothing to wait for."""


class Mute:
    """A group whose broadcasts end at once and carry nothing."""

    def __init__(self) -> None:
        self.aborted = False

    def broadcast(self, buffer: torch.Tensor, root: int, timeout: Any) -> Mute:
        return self

    def wait(self, timeout: Any) -> None:
        """Returns at once."""

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

    monkeypatch.setattr(nccl_group, "_process_group", gloo)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    yield


def both_ends(timeout_s: float = 60) -> dict[str, Any]:
    """The trainer's and a worker's group, or the errors with which they did not form."""
    store, port = serve_store("127.0.0.1", None, 2, timeout_s)
    found: dict[str, Any] = {"store": store}

    def run(name: str, form: Any) -> None:
        try:
            found[name] = form()
        except RuntimeError as error:
            found[name] = error

    ends = {
        "trainer": lambda: NCCLGroup.lead(store, 2, timeout_s, CPU),
        "worker": lambda: NCCLGroup.join("127.0.0.1", port, 1, 2, timeout_s, CPU),
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


def test_a_group_that_carries_nothing_is_found_when_it_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    mute = Mute()
    monkeypatch.setattr(nccl_group, "_process_group", lambda *args: mute)
    ends = both_ends()
    assert "0 arrived where" in str(ends["worker"])
    assert mute.aborted


def test_a_broadcast_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = both_ends()
    monkeypatch.setattr(Mute, "is_completed", lambda self: False)
    ends["worker"]._group = Mute()
    with pytest.raises(RuntimeError, match="did not end within 60 s"):
        ends["worker"].broadcast(torch.zeros(1))


@pytest.mark.parametrize("before", [None, "0"])
def test_the_variable_of_the_group_is_set_only_while_it_is_made(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with nccl_group._environment(VARIABLE, "1"):
        assert os.environ[VARIABLE] == "1"
    assert os.environ.get(VARIABLE) == before
