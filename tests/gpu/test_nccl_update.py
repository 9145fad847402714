"""Weight updates over NCCL: the server on one GPU, the trainer's weights on another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fakes.random_model import perturb, random_model, save_random_model
from fakes.updated_server import connect, damage_second_buffer, probe
from fakes.visible_gpus import visible_gpu
from fakes.vllm_process import VLLMProcess

from pipelinerl.inference.transfer import IN_PLACE_VARIABLE
from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.transport import GroupSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
#: A fixed cache: nothing is measured at the start, so that other processes may use the GPU meanwhile.
SMALL_CACHE = {"gpu_memory_utilization": 0.1, "kv-cache-memory-bytes": 1 << 30}


@pytest.mark.parametrize("in_place", ["0", "1"])
@pytest.mark.parametrize("tied", [True, False])
def test_trainer_and_server_agree_after_updates_over_nccl(tmp_path: Path, tied: bool, in_place: str) -> None:
    folder = save_random_model(tmp_path / "model", tied=tied, head_size=64)
    model = random_model(tied=tied, seed=5, head_size=64).cuda()
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(1), IN_PLACE_VARIABLE: in_place}
    settings = {"dtype": "bfloat16", **SMALL_CACHE}
    server = VLLMProcess(folder, tmp_path / "server.log", settings, transport="nccl", environ=environ)
    with server, connect(server, "nccl", chunk_bytes=10_000) as publisher:
        for version in range(5):
            perturb(model, seed=version)
            report = publisher.publish(version, ModuleSource(model, dtype=torch.bfloat16))
            assert report.failed == {}
            assert probe(publisher, model).mean_abs_diff < 0.1


def test_a_buffer_that_arrives_as_zeros_is_refused_and_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random_model(tmp_path / "model", tied=True, head_size=64)
    model = random_model(tied=True, seed=6, head_size=64).cuda()
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(1)}
    settings = {"dtype": "bfloat16", **SMALL_CACHE}
    server = VLLMProcess(folder, tmp_path / "server.log", settings, transport="nccl", environ=environ)
    with server, connect(server, "nccl", chunk_bytes=10_000) as publisher:
        damage_second_buffer(monkeypatch, GroupSender)
        report = publisher.publish(0, ModuleSource(model, dtype=torch.bfloat16))
        assert report.failed == {}
        assert report.updated[0].recovered_from
        assert "buffer 2 of" in server.tail(10**9)
        assert probe(publisher, model).mean_abs_diff < 0.1
