"""An adapter on its way to a server that holds the frozen model: what fits is sent, the rest refused before a pause."""

from __future__ import annotations

import pytest
import torch
from fakes.fake_server import FakeServer

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.publisher import WeightPublisher
from pipelinerl.weights.report import ServerAddress
from pipelinerl.weights.source import ModuleSource

MODEL = {"layers.0.q_proj.weight": (6, 4), "norm.weight": (4,)}


def adapter(rank: int = 2, dtype: torch.dtype = torch.float32) -> ModuleSource:
    module = torch.nn.ModuleDict({"A": torch.nn.Linear(4, rank, bias=False), "B": torch.nn.Linear(rank, 6, bias=False)})
    return ModuleSource(module, dtype=dtype, rename=lambda name: f"layers.0.q_proj.lora_{name}")


def publish(source: ModuleSource, print_of_trainer: str | None = "same", info: dict[str, object] | None = None) -> None:
    """To a server with room for rank 2 and the base model `same`; it must have what was sent, or not be touched."""
    info = {"adapter_rank": 2, "base_print": "same"} if info is None else info
    with (
        FakeServer(MODEL, info=info) as server,
        WeightPublisher(server.token, timeout_s=60, base_print=print_of_trainer) as publisher,
    ):
        publisher.connect([ServerAddress("actor_llm_0", server.url)])
        before = len(server.calls)
        try:
            report = publisher.publish(1, source)
        except WeightSyncError:
            assert len(server.calls) == before and not server.tensors
            raise
        assert report.failed == {} and server.version == "1"
        assert report.sent_bytes == 4 * (2 * 4 + 6 * 2)
        for bucket in source.buckets():
            assert all(torch.equal(server.tensors[name], tensor) for name, tensor in bucket)


@pytest.mark.parametrize("print_of_trainer", ["same", None])
def test_an_adapter_that_fits_is_sent_without_the_model(print_of_trainer: str | None) -> None:
    publish(adapter(), print_of_trainer)


@pytest.mark.parametrize(
    ("source", "print_of_trainer", "message"),
    [
        (adapter(rank=3), "same", r"got rank 3, the server has room for 2"),
        (adapter(dtype=torch.bfloat16), "same", r"its base model is in float32.*values of bfloat16: set vllm_config"),
        (adapter(), "another", r"its model folder has other weights than the trainer read: model_path must stay"),
        (ModuleSource(torch.nn.Linear(4, 6)), "same", r"bias is no part of an adapter; weight is no part"),
    ],
)
def test_what_does_not_fit_is_refused(source: ModuleSource, print_of_trainer: str, message: str) -> None:
    with pytest.raises(WeightSyncError, match=rf"actor_llm_0: the update does not fit the server's model: .*{message}"):
        publish(source, print_of_trainer)


def test_a_server_that_takes_models_takes_no_adapter() -> None:
    with pytest.raises(WeightSyncError, match=r"2 tensors are left out.*2 tensors are unknown to the model"):
        publish(adapter(), info={})
