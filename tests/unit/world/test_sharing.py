"""How many servers a GPU carries, as a table."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.decoder_shape import decoder_shape

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.world import Cluster, ClusterNode, WorldMap, build_world_map, cards_of, nvml_cards
from pipelinerl.world import cluster as cluster_module
from pipelinerl.world.cluster import Card
from pipelinerl.world.forecast import trainer_memory, trainer_setup
from pipelinerl.world.model_shape import ModelShape, guess_shape
from pipelinerl.world.sharing import free_cores, needs_of, servers_on_gpu

GIB = 2**30


#: Parameters, keys and values of a token, context: as published.
MODELS = {
    "135M": decoder_shape(134_515_008, 30, 3, 64, 8192),
    "0.6B": decoder_shape(596_049_920, 28, 8, 128, 40960),
    "1.5B": decoder_shape(1_543_714_304, 28, 2, 128, 32768),
    "7B": decoder_shape(7_615_616_512, 28, 4, 128, 32768),
}


@pytest.mark.parametrize(
    ("model", "gpu_gib", "context", "cores", "with_rank", "changes", "servers"),
    [
        ("135M", 140, 1024, 16, True, {}, 4),
        ("135M", 140, 1024, 16, False, {}, 4),
        ("135M", 80, 8192, 16, True, {}, 4),
        ("135M", 24, 1024, 16, False, {}, 3),  # 3 x 3.5 GB of weights and overhead are half of 23 GB
        ("135M", 24, 1024, 16, True, {}, 2),
        ("135M", 140, 1024, 8, True, {}, 2),  # one process each of actor, rollouts, preprocessor and trainer
        ("135M", 140, 1024, 4, True, {}, 1),
        ("0.6B", 80, 4096, 16, False, {}, 4),
        ("0.6B", 80, 4096, 16, True, {}, 4),
        ("0.6B", 80, 32768, 16, False, {}, 2),  # 8 sequences of 3.8 GB in each cache
        ("0.6B", 80, None, 16, True, {}, 1),  # of 40960 tokens
        ("0.6B", 80, 32768, 16, False, {"kv-cache-dtype": "fp8"}, 3),
        ("0.6B", 80, 4096, 16, False, {"dtype": "float32"}, 4),
        ("0.6B", 80, 4096, 16, False, {"kv-cache-memory-bytes": 4 * GIB}, 4),
        ("0.6B", 80, 4096, 16, False, {"kv-cache-memory-bytes": 40 * GIB}, 1),
        ("1.5B", 80, 4096, 16, False, {}, 4),
        ("1.5B", 80, 4096, 16, True, {}, 3),
        ("1.5B", 48, 4096, 16, True, {}, 1),
        ("7B", 80, 10000, 128, False, {}, 1),
        ("7B", 140, 4096, 128, False, {}, 1),
        ("135M", None, 1024, 16, True, {}, 1),
        (None, 140, 1024, 16, True, {}, 1),
    ],
)
def test_servers_on_a_gpu(
    model: str | None,
    gpu_gib: int | None,
    context: int | None,
    cores: int,
    with_rank: bool,
    changes: dict[str, Any],
    servers: int,
) -> None:
    kwargs = ({} if context is None else {"max_model_len": context}) | changes
    config = RunConfig.model_validate(
        {"output_dir": "x", "vllm_config": {"vllm_kwargs": kwargs}, "finetune": {"seq_length": 40960}}
    )
    memory = None if gpu_gib is None else gpu_gib * GIB
    cluster = Cluster((ClusterNode("h", ("0",), cores, memory),))
    needs = needs_of(config, cluster, MODELS.get(model or ""), 1)
    assert (needs is None) == (model is None or gpu_gib is None)
    assert servers_on_gpu(needs, free_cores(config, cluster, 1, 1), with_rank) == servers


def shape_by(source: Any, name: str = "Qwen/Qwen2.5-7B") -> ModelShape:
    found = guess_shape(name)
    assert found is not None
    return replace(found, source=source)


def one_gpu(shape: ModelShape, gpu_gib: int = 80, **changes: Any) -> WorldMap:
    vllm = {"vllm_kwargs": {"max_model_len": 10000}}
    config = RunConfig.model_validate({"output_dir": "x", "vllm_config": vllm} | changes)
    cluster = Cluster((ClusterNode("h", ("0",), 16, gpu_gib * GIB),))
    return build_world_map(config, cluster, model=shape)


OFFLOAD = {"type": "deepspeed", "config": "deepspeed_stage2_bf16_offload"}
LORA = {"lora": {"enabled": True}}
QUANTIZED = {"vllm_kwargs": {"quantization": "fp8", "max_model_len": 10000}}


@pytest.mark.parametrize(
    ("name", "changes", "notes"),
    [
        ("x/7b", {"backend": OFFLOAD}, 1),
        ("x/7b", {"finetune": LORA, "vllm_config": QUANTIZED}, 1),
        ("x/14b", {"finetune": LORA}, 2),  # frozen weights in 16 bits; the cache is small, and that is said
    ],
)
def test_what_fits_next_to_a_trainer_is_not_refused(name: str, changes: dict[str, Any], notes: int) -> None:
    """Servers and trainer stay within the GPU, as the forecast counts them, and a cache holds a request at least."""
    shape = shape_by("weight files", name)
    world = one_gpu(shape, **changes)
    config = RunConfig.model_validate({"output_dir": "x", **changes})
    (server,) = world.jobs_of("actor_llm")
    assert server.cache_bytes is not None and server.cache_bytes >= 10000 * shape.kv_bytes()
    weights = shape.parameters * (1 if config.vllm_config.option("quantization")[1] else 2)
    rank = trainer_memory(trainer_setup(config, shape, 1, False)).total
    assert 0.7 * 80 * GIB < weights + server.cache_bytes + rank < 80 * GIB
    assert len(world.notes) == notes


@pytest.mark.parametrize(
    ("source", "backend", "is_refused"),
    [
        ("weight files", {}, True),  # 16 bytes for each of 7.6 B parameters
        ("config.json", {}, False),
        ("name", {}, False),
        ("weight files", OFFLOAD, False),  # 16 + 16 GB without activations and cache
    ],
)
def test_what_cannot_fit_is_refused_if_it_is_known(source: Any, backend: dict[str, str], is_refused: bool) -> None:
    shape = shape_by(source)
    with pytest.raises(ConfigError) if is_refused else nullcontext() as caught:
        world = one_gpu(shape, 34, backend=backend or {"type": "plain"})
        assert world.job("actor_llm_0").cache_bytes == 10000 * shape.kv_bytes()
        assert len(world.notes) == 2
    assert caught is None or caught.value.key == "world.servers_per_gpu"


def test_the_memory_of_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card("GPU-1a2b", "H100", 80), Card("GPU-1a3c", "A100", 40)]
    monkeypatch.setattr(cluster_module, "nvml_cards", lambda: cards)
    expected = {"0": 80, "0,1": 40, "GPU-1a3c": 40, "GPU-1a2": 80, "2": None, "0,MIG-1": None}
    machines = {visible: ClusterNode.from_env({"CUDA_VISIBLE_DEVICES": visible}) for visible in expected}
    assert {visible: machine.gpu_bytes for visible, machine in machines.items()} == expected
    everything = ClusterNode.from_env({}, 4, "h")
    assert (everything.host, everything.gpus, everything.cores, everything.gpu_bytes) == ("h", ("0", "1"), 4, 40)


def test_a_card_that_does_not_tell_its_memory_is_of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is divided by MIG, and one that shares the machine's memory."""

    class NVMLError(Exception): ...

    def told(handle: int) -> Any:
        if handle:
            raise NVMLError
        return SimpleNamespace(total=80)

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: told(handle) and "H100",
        nvmlDeviceGetMemoryInfo=told,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert nvml_cards() == [("GPU-0", "H100", 80), ("GPU-1", "GPU", 0)]
    assert [card.memory_bytes for card in cards_of(["0", "1", "2"])] == [80, 0, 0]
