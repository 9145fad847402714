"""Adapters alone on their way to a server on a GPU, which computes with vLLM's kernels what the trainer computes.

Over NCCL to another GPU, and through the memory of the trainer's own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fakes.adapter_backend import adapter_backend, draw_adapter
from fakes.random_model import save_random_model
from fakes.static_pool import StaticPool
from fakes.updated_server import PROBED, connect
from fakes.visible_gpus import visible_gpu
from fakes.vllm_process import VLLMProcess

from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs an NVIDIA GPU"),
]
#: A fixed cache: nothing is measured at the start, so that other processes may use the GPU meanwhile.
SMALL_CACHE = {"gpu_memory_utilization": 0.1, "kv-cache-memory-bytes": 1 << 30}


def check_updates(folder: Path, transport: str, server_gpu: int, targets: list[str], is_eager: bool) -> None:
    """Three adapters, one after the other; the trainer is on GPU 0."""
    model = save_random_model(folder / "model", tied=True, head_size=64)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(server_gpu)}
    kwargs = {"dtype": "bfloat16", "enforce-eager": is_eager, **SMALL_CACHE}
    arguments = ["--adapter-rank", "4"]
    server = VLLMProcess(model, folder / "log", kwargs, transport=transport, environ=environ, arguments=arguments)
    backend = adapter_backend(torch.bfloat16, "cuda:0", head_size=64, target_modules=targets)
    ranks = Ranks(device=torch.device("cuda", 0))
    with server, connect(server, transport, chunk_bytes=10_000) as publisher:
        feed = WeightSync(backend, ranks, StaticPool(publisher))
        for version in range(3):
            draw_adapter(backend, version)
            difference = feed.send(version, PROBED).probe_abs_diff
            assert difference is not None and difference < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_the_server_computes_with_the_adapter(tmp_path: Path, targets: list[str], is_eager: bool) -> None:
    """With CUDA graphs too, which hold the addresses of the slot that every update fills anew."""
    check_updates(tmp_path, "nccl", 1, targets, is_eager)


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_a_server_on_the_trainers_card_does_so_too(tmp_path: Path, targets: list[str], is_eager: bool) -> None:
    check_updates(tmp_path, "ipc", 0, targets, is_eager)
