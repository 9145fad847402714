"""Weight updates of one server with two workers (tensor-parallel-size 2): each loads its part of every matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.random_model import perturb, random_model, save_random_model
from fakes.updated_server import (
    IPC_ON_CPU,
    IPC_ON_CPU_ENVIRON,
    CutShort,
    connect,
    damage_second_buffer,
    probe,
)
from fakes.vllm_process import VLLMProcess

from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.weights.transport import SenderOptions, open_sender
from pipelinerl.world.jobs import GPU_TRANSPORT, TRANSPORTS

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
SMALL_BUFFERS = 10_000
#: How weights come, and whether the server loads them in place, as one on a GPU does.
KINDS: dict[str, tuple[str, bool]] = {name: (name, False) for name in TRANSPORTS if name != GPU_TRANSPORT} | {
    "ipc, in place": ("ipc", True)
}
IN_PLACE_SITE = Path(__file__).parents[1] / "fakes" / "in_place_site"


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """One server of each kind, with an untied head: both vocabulary matrices are split."""
    transport, in_place = KINDS[request.param]
    folder = tmp_path_factory.mktemp("parallel")
    model = save_random_model(folder / "model", tied=False)
    kwargs = {**IPC_ON_CPU, "tensor-parallel-size": 2}
    environ = {**os.environ, **IPC_ON_CPU_ENVIRON}
    if in_place:
        environ["PYTHONPATH"] = str(IN_PLACE_SITE)
    with VLLMProcess(model, folder / "server.log", kwargs, transport=transport, environ=environ) as server:
        yield server


@pytest.fixture
def transport(server: VLLMProcess, request: pytest.FixtureRequest) -> str:
    return KINDS[request.node.callspec.params["server"]][0]


@pytest.mark.parametrize("chunk_bytes", [SMALL_BUFFERS, 2**28])
def test_w1_both_workers_compute_what_the_trainer_does(server: VLLMProcess, transport: str, chunk_bytes: int) -> None:
    model = random_model(tied=False, seed=5)
    with connect(server, transport, chunk_bytes=chunk_bytes) as publisher:
        publisher.publish(0, ModuleSource(model))
        assert probe(publisher, model).max_abs_diff < TOLERANCE
        for version in (1, 2):
            perturb(model, seed=version)
            # The old weights must be told apart, or the test proves nothing.
            assert probe(publisher, model).mean_abs_diff > 100 * TOLERANCE
            assert publisher.publish(version, ModuleSource(model)).failed == {}
            assert probe(publisher, model).max_abs_diff < TOLERANCE


def test_a_damaged_buffer_is_refused_by_both_workers_and_sent_again(
    server: VLLMProcess, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(tied=False, seed=7)

    def flip_a_bit(buffer: torch.Tensor) -> torch.Tensor:
        damaged = buffer.clone()
        damaged[11] ^= 8
        return damaged

    with connect(server, transport, chunk_bytes=SMALL_BUFFERS) as publisher:
        sender = open_sender(SenderOptions(transport, "127.0.0.1", None, 60))
        damage_second_buffer(monkeypatch, type(sender), flip_a_bit)
        report = publisher.publish(9, ModuleSource(model))
        assert report.failed == {}
        assert "buffer 2 of" in str(report.updated[0].recovered_from)
        assert probe(publisher, model).max_abs_diff < TOLERANCE


def test_l2_a_restarted_trainer_repairs_two_half_loaded_workers(server: VLLMProcess, transport: str) -> None:
    old, half, new = (random_model(tied=False, seed=seed) for seed in (10, 11, 12))
    with connect(server, transport, chunk_bytes=SMALL_BUFFERS) as publisher:
        publisher.publish(30, ModuleSource(old))
        with pytest.raises(InterruptedError):
            publisher.publish(31, CutShort(half))
    with connect(server, transport, chunk_bytes=SMALL_BUFFERS) as publisher:
        assert publisher.publish(32, ModuleSource(new)).failed == {}
        assert probe(publisher, new).max_abs_diff < TOLERANCE


def test_weights_that_leave_a_matrix_out_are_refused(server: VLLMProcess, transport: str) -> None:
    model = random_model(tied=False, seed=13)

    class Incomplete(ModuleSource):
        def metadata(self) -> list[Any]:
            return [meta for meta in super().metadata() if "1.self_attn.k_proj.weight" not in meta.name]

    with (
        connect(server, transport, chunk_bytes=SMALL_BUFFERS) as publisher,
        pytest.raises(Exception, match=r"does not fit the server's model.*k_proj"),
    ):
        publisher.publish(40, Incomplete(model))
