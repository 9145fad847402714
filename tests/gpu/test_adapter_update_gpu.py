"""Adapters alone over NCCL: a server on one GPU computes with vLLM's kernels what the trainer computes on another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fakes.random_model import random_ids, random_model, save_random_model
from fakes.visible_gpus import visible_gpu
from fakes.vllm_process import VLLMProcess

from pipelinerl.config.finetune import FinetuneConfig, LoraConfig
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, register_own_attention
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weights_feed import WeightsFeed
from pipelinerl.weights.publisher import WeightPublisher
from pipelinerl.weights.report import ServerAddress

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
#: A fixed cache: nothing is measured at the start, so that other processes may use the GPU meanwhile.
SMALL_CACHE = {"gpu_memory_utilization": 0.1, "kv-cache-memory-bytes": 1 << 30}
PROBED = [random_ids(length, seed=length) for length in (2, 33, 80)]


def backend_on_gpu(targets: list[str]) -> PlainBackend:
    register_own_attention()
    model = random_model(tied=True, head_size=64)
    model.set_attn_implementation(SEGMENTED_ATTENTION)
    bf16 = torch.bfloat16
    policy = PolicyModel(model.train(), chunk_tokens=16, compute_dtype=bf16, served_dtype=bf16).cuda()
    settings = LoraConfig(enabled=True, sync="adapter", r=4, alpha=16, target_modules=targets)
    add_adapters(policy, settings, "base")
    policy.cuda()
    return PlainBackend(policy, FinetuneConfig(), Ranks(device=torch.device("cuda", 0)))


@torch.no_grad()
def draw(policy: PolicyModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_the_server_computes_with_the_adapter(tmp_path: Path, targets: list[str], is_eager: bool) -> None:
    """With CUDA graphs too, which hold the addresses of the slot that every update fills anew."""
    folder = save_random_model(tmp_path / "model", tied=True, head_size=64)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(1)}
    kwargs = {"dtype": "bfloat16", "enforce-eager": is_eager, **SMALL_CACHE}
    arguments = ["--adapter-rank", "4"]
    server = VLLMProcess(folder, tmp_path / "log", kwargs, transport="nccl", environ=environ, arguments=arguments)
    backend = backend_on_gpu(targets)
    ranks = Ranks(device=torch.device("cuda", 0))
    with server, WeightPublisher(server.token, transport="nccl", timeout_s=60, chunk_bytes=10_000) as publisher:
        publisher.connect([ServerAddress("server", server.url)])
        feed = WeightsFeed(backend, ranks, publisher, torch.bfloat16, sends_adapter=True)
        for version in range(3):
            draw(backend.policy, version)
            difference = feed.send(version, PROBED).probe_abs_diff
            assert difference is not None and difference < 0.1
