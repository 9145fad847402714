"""Weights through shared memory into a real server. On this machine a mapped file stands for the GPU's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes.adapter_backend import adapter_backend, draw_adapter
from fakes.random_model import perturb, random_model, save_random_model
from fakes.static_pool import StaticPool
from fakes.updated_server import IPC_ON_CPU, IPC_ON_CPU_ENVIRON, PROBED, connect, probe
from fakes.vllm_process import VLLMProcess

from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import WeightSync
from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.ipc import HandleSender

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    folder = tmp_path_factory.mktemp("ipc_server")
    model = save_random_model(folder / "model", tied=True)
    environ = {**os.environ, **IPC_ON_CPU_ENVIRON}
    with VLLMProcess(model, folder / "server.log", IPC_ON_CPU, transport="ipc", environ=environ) as server:
        yield server


def test_l1_a_trainer_that_breaks_off_is_followed_by_a_whole_update(
    server: VLLMProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second buffer never comes and the channel closes; the second attempt sends everything again."""
    model = random_model(tied=True, seed=6)
    sent: list[int] = []
    send = HandleSender.send

    def send_or_fail(self: HandleSender, buffer: torch.Tensor) -> None:
        sent.append(buffer.numel())
        if len(sent) == 2:
            raise OSError("injected: no second buffer")
        send(self, buffer)

    with connect(server, "ipc", chunk_bytes=10_000) as publisher:
        monkeypatch.setattr(HandleSender, "send", send_or_fail)
        report = publisher.publish(7, ModuleSource(model))
        assert report.failed == {} and "injected" in str(report.updated[0].recovered_from)
        assert probe(publisher, model).max_abs_diff < TOLERANCE


def test_a_server_that_slept_is_whole_after_the_next_update(server: VLLMProcess) -> None:
    """Level 0 is the pause that a server on a CPU sleeps by; levels 1 and 2 do nothing there but are answered."""
    model = random_model(tied=True, seed=10)
    with connect(server, "ipc", chunk_bytes=10_000) as publisher:
        for level in (0, 1, 2):
            publisher.sleep(level)
            perturb(model, seed=level)
            assert publisher.publish(level, ModuleSource(model)).failed == {}
            assert probe(publisher, model).max_abs_diff < TOLERANCE


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_an_adapter_alone_comes_that_way_too(tmp_path: Path, targets: list[str]) -> None:
    """In buffers that the trainer uses again, while the server keeps the tensors."""
    model = save_random_model(tmp_path / "model", tied=True)
    environ, arguments = {**os.environ, **IPC_ON_CPU_ENVIRON}, ["--adapter-rank", "4"]
    backend = adapter_backend(target_modules=targets)
    process = VLLMProcess(model, tmp_path / "log", IPC_ON_CPU, transport="ipc", environ=environ, arguments=arguments)
    with process as server, connect(server, "ipc", chunk_bytes=3_000) as publisher:
        feed = WeightSync(backend, Ranks(), StaticPool(publisher))
        for version in range(3):
            before = feed.probe.sequences(PROBED)[2].logprobs
            draw_adapter(backend, version)
            after = feed.probe.sequences(PROBED)[2].logprobs
            # The adapter before must be told apart, or the test proves nothing.
            assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 100 * TOLERANCE
            difference = feed.send(version, PROBED).probe_abs_diff
            assert difference is not None and difference < TOLERANCE
