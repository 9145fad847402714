"""Weight updates over NCCL: the server on one GPU, the trainer's weights on another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fakes.random_model import model_logprobs, perturb, random_ids, random_model, save_random_model
from fakes.visible_gpus import visible_gpu
from fakes.vllm_process import VLLMProcess

from pipelinerl.inference.transfer import IN_PLACE_VARIABLE
from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.sync import ProbeSequence, WeightPublisher
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
    with server, WeightPublisher(server.token, transport="nccl", timeout_s=60, chunk_bytes=10_000) as publisher:
        publisher.connect([ServerAddress("server", server.url)])
        for version in range(5):
            perturb(model, seed=version)
            report = publisher.publish(version, ModuleSource(model, dtype=torch.bfloat16))
            assert report.failed == {}
            ids = random_ids(60, seed=version)
            result = publisher.probe([ProbeSequence(ids, model_logprobs(model, ids))])
            assert result.mean_abs_diff < 0.1


def test_a_buffer_that_arrives_as_zeros_is_refused_and_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random_model(tmp_path / "model", tied=True, head_size=64)
    model = random_model(tied=True, seed=6, head_size=64).cuda()
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(1)}
    settings = {"dtype": "bfloat16", **SMALL_CACHE}
    server = VLLMProcess(folder, tmp_path / "server.log", settings, transport="nccl", environ=environ)
    send, sent = GroupSender.send, []

    def send_zeros_once(self: GroupSender, buffer: torch.Tensor) -> None:
        sent.append(buffer.numel())
        send(self, torch.zeros_like(buffer) if len(sent) == 2 else buffer)

    with server, WeightPublisher(server.token, transport="nccl", timeout_s=60, chunk_bytes=10_000) as publisher:
        publisher.connect([ServerAddress("server", server.url)])
        monkeypatch.setattr(GroupSender, "send", send_zeros_once)
        report = publisher.publish(0, ModuleSource(model, dtype=torch.bfloat16))
        assert report.failed == {}
        assert report.updated[0].recovered_from
        assert "buffer 2 of" in server.tail(10**9)
        ids = random_ids(60, seed=1)
        result = publisher.probe([ProbeSequence(ids, model_logprobs(model, ids))])
        assert result.mean_abs_diff < 0.1
