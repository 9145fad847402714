"""A publisher connected with one server, and requests to that server. For tests of weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fakes.mid_sequence import Endpoint
from fakes.random_model import model_logprobs, random_ids

from pipelinerl.weights.buffers import ModuleSource, NamedTensors
from pipelinerl.weights.link import ControlClient, ServerAddress, control_session
from pipelinerl.weights.sync import ProbeResult, ProbeSequence, WeightPublisher

#: What a server on a CPU is started with where its transport, `ipc`, does not say so.
IPC_ON_CPU = {"dtype": "float32", "enable-chunked-prefill": False}
IPC_ON_CPU_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}
PROBED = [random_ids(length, seed=length) for length in (2, 33, 80)]


def connect(server: Endpoint, transport: str = "gloo", **settings: Any) -> WeightPublisher:
    """A publisher whose only server is `tiny`."""
    publisher = WeightPublisher(server.token, **{"timeout_s": 60, "transport": transport, **settings})
    publisher.connect([ServerAddress("tiny", server.url)])
    return publisher


def probe(publisher: WeightPublisher, model: torch.nn.Module, probed: Sequence[list[int]] = PROBED) -> ProbeResult:
    return publisher.probe([ProbeSequence(ids, model_logprobs(model, ids)) for ids in probed], "tiny")


def publish(server: Endpoint, version: int, model: torch.nn.Module) -> None:
    with connect(server) as publisher:
        assert publisher.publish(version, ModuleSource(model)).failed == {}


def with_client(server: Endpoint, call: Callable[[ControlClient], Any]) -> Any:
    """What the coroutine `call(client)` returns."""

    async def run() -> Any:
        async with control_session(server.token) as session:
            return await call(ControlClient(session, "tiny", server.url))

    return asyncio.run(run())


def generate(server: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = with_client(server, lambda client: client.generate(body))
    return answer


def sampling(ids: list[int], max_tokens: int, temperature: float = 1.0) -> dict[str, Any]:
    """The body of a request that has exactly `max_tokens`, with log-probs."""
    wanted = {"max_tokens": max_tokens, "temperature": temperature, "logprobs": 0, "ignore_eos": True}
    return {"model": "actor", "token_ids": ids, "sampling_params": wanted}


def output_of(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and their log-probs."""
    (choice,) = answer["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


class CutShort(ModuleSource):
    """Of a trainer that dies after the first of several buffers."""

    def buckets(self) -> Iterator[NamedTensors]:
        whole = [item for bucket in super().buckets() for item in bucket]
        yield whole[:9]
        raise InterruptedError("trainer died")


def damage_second_buffer(
    monkeypatch: pytest.MonkeyPatch, sender: Any, damage: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like
) -> None:
    """The second buffer that a sender of this class sends from now on arrives as `damage` makes it."""
    send, sent = sender.send, []

    def send_damaged_once(self: Any, buffer: torch.Tensor) -> None:
        sent.append(buffer.numel())
        send(self, damage(buffer) if len(sent) == 2 else buffer)

    monkeypatch.setattr(sender, "send", send_damaged_once)
