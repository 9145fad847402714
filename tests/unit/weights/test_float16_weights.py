"""Servers in float16: weights arrive as float16 or fp32, and values beyond float16's range are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fakes.fake_server import FakeServer

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.buffers import packed_buffers
from pipelinerl.weights.packing import TensorMeta, unpack
from pipelinerl.weights.publisher import WeightPublisher
from pipelinerl.weights.report import ServerAddress
from pipelinerl.weights.source import CollectiveSource, ModuleSource
from pipelinerl.weights.verify import ProbeSequence

SHAPES = {"weight": (2, 3), "bias": (2,)}
LARGEST = 65504.0


@pytest.fixture
def model() -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, -LARGEST], [2.0**-24, 2.0**-26, 0.1]]))
        model.bias.copy_(torch.tensor([0.5, -3.0]))
    return model


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(SHAPES, dtype="float16") as server:
        yield server


@pytest.fixture
def publisher(server: FakeServer) -> Iterator[WeightPublisher]:
    with WeightPublisher(server.token, timeout_s=60) as publisher:
        publisher.connect([ServerAddress("actor_llm_0", server.url)])
        yield publisher


def buffers(model: torch.nn.Module, dtype: torch.dtype, servers: tuple[str, ...]) -> list[torch.Tensor]:
    source = ModuleSource(model, dtype=dtype)
    return list(packed_buffers(source, source.metadata(), 2**20, 1, servers))


def test_fp32_weights_are_rounded_to_float16_once(model, publisher, server) -> None:
    assert publisher.publish(1, ModuleSource(model, dtype=torch.float16)).failed == {}
    arrived = server.tensors["weight"]
    assert arrived.dtype == torch.float16
    # Ties go to the even neighbour; below half of the smallest float16 lies 0.
    assert arrived.tolist() == [[1.0, 1 + 2 * 2**-10, -LARGEST], [2.0**-24, 0.0, 0.0999755859375]]


def test_fp32_weights_arrive_as_they_are(model, publisher, server) -> None:
    assert publisher.publish(1, ModuleSource(model)).failed == {}
    assert torch.equal(server.tensors["weight"], model.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [70000.0, -1e30, float("inf"), float("nan")])
def test_a_value_beyond_float16_is_refused_by_name(model, dtype: torch.dtype, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias[1] = value
    with pytest.raises(WeightSyncError, match=r"actor_llm_0, actor_llm_1.*: bias has .*at most 65504: use vllm_config"):
        buffers(model, dtype, ("actor_llm_0", "actor_llm_1"))
    assert buffers(model, dtype, ())


def test_the_largest_float16_value_passes(model) -> None:
    (buffer,) = buffers(model, torch.float32, ("actor_llm_0",))
    tensors = dict(unpack(buffer, [TensorMeta(name, torch.float32, shape) for name, shape in SHAPES.items()]))
    assert float(tensors["weight"].min()) == -LARGEST


def test_a_refused_update_pauses_nobody(model, publisher, server) -> None:
    with torch.no_grad():
        model.bias[0] = 70000.0
    with pytest.raises(WeightSyncError, match="bias has a value of 70000"):
        publisher.publish(1, ModuleSource(model))
    assert (server.version, server.paused, server.tensors) == ("default", False, {})


def test_other_servers_take_large_values(model) -> None:
    with torch.no_grad():
        model.bias[0] = 70000.0
    with FakeServer(SHAPES, dtype="bfloat16") as server, WeightPublisher(server.token, timeout_s=60) as publisher:
        publisher.connect([ServerAddress("actor_llm_0", server.url)])
        assert publisher.publish(1, ModuleSource(model)).failed == {}
        assert float(server.tensors["bias"][0]) == 70000.0


def test_a_refused_pass_over_a_sharded_model_is_read_to_its_end() -> None:
    metas = [TensorMeta(name, torch.float32, (1,)) for name in "abc"]
    taken = []

    def gather() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for meta in metas:
            yield [(meta.name, torch.tensor([1e6]))]
            taken.append(meta.name)

    source = CollectiveSource(metas, gather, lambda flag: flag)
    with pytest.raises(WeightSyncError, match="a has a value of 1e"):
        list(packed_buffers(source, metas, 1, 1, ("actor_llm_0",)))
    assert taken == ["a", "b", "c"]


def test_a_probe_says_what_the_servers_compute_in(model, publisher) -> None:
    publisher.publish(1, ModuleSource(model))
    assert publisher.probe([ProbeSequence([1, 2], [-0.5])]).server_dtypes == {"actor_llm_0": "float16"}
