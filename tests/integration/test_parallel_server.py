"""Weight updates of one server with two workers (tensor-parallel-size 2): each loads its part of every matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.random_model import model_logprobs, perturb, random_ids, random_model, save_random_model
from fakes.vllm_process import VLLMProcess

from pipelinerl.weights.buffers import ModuleSource, NamedTensors
from pipelinerl.weights.ipc import HandleSender
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.sync import ProbeResult, ProbeSequence, WeightPublisher
from pipelinerl.weights.transport import GroupSender

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
SMALL_BUFFERS = 10_000
#: How weights come, and whether the server loads them in place, as one on a GPU does.
KINDS: dict[str, tuple[str, bool]] = {
    "gloo": ("gloo", False),
    "ipc": ("ipc", False),
    "ipc, in place": ("ipc", True),
}
IN_PLACE_SITE = Path(__file__).parents[1] / "fakes" / "in_place_site"
# What a server on a CPU is started with; the transport `ipc` alone does not say so here.
CPU_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """One server of each kind, with an untied head: both vocabulary matrices are split."""
    transport, in_place = KINDS[request.param]
    folder = tmp_path_factory.mktemp("parallel")
    model = save_random_model(folder / "model", tied=False)
    kwargs = {"dtype": "float32", "enable-chunked-prefill": False, "tensor-parallel-size": 2}
    environ = {**os.environ, **CPU_ENVIRON}
    if in_place:
        environ["PYTHONPATH"] = str(IN_PLACE_SITE)
    with VLLMProcess(model, folder / "server.log", kwargs, transport=transport, environ=environ) as server:
        yield server


def connect(server: VLLMProcess, transport: str, **settings: Any) -> WeightPublisher:
    publisher = WeightPublisher(
        server.token, timeout_s=120, transports={"tiny": transport}, **{"chunk_bytes": SMALL_BUFFERS, **settings}
    )
    publisher.connect([ServerAddress("tiny", server.url)])
    return publisher


def probe(publisher: WeightPublisher, model: torch.nn.Module) -> ProbeResult:
    sequences = [random_ids(length, seed=length) for length in (2, 33, 80)]
    return publisher.probe([ProbeSequence(ids, model_logprobs(model, ids)) for ids in sequences])


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
    kind: Any = {"gloo": GroupSender, "ipc": HandleSender}[transport]
    send, sent = kind.send, []

    def send_damaged_once(self: Any, buffer: torch.Tensor) -> None:
        sent.append(buffer.numel())
        if len(sent) == 2:
            buffer = buffer.clone()
            buffer[11] ^= 8
        send(self, buffer)

    with connect(server, transport) as publisher:
        monkeypatch.setattr(kind, "send", send_damaged_once)
        report = publisher.publish(9, ModuleSource(model))
        assert report.failed == {}
        assert "buffer 2 of" in str(report.updated[0].recovered_from)
        assert probe(publisher, model).max_abs_diff < TOLERANCE


class CutShort(ModuleSource):
    """A trainer that dies after the first of several buffers."""

    def buckets(self) -> Iterator[NamedTensors]:
        whole = [item for bucket in super().buckets() for item in bucket]
        yield whole[:9]
        raise InterruptedError("trainer died")


def test_l2_a_restarted_trainer_repairs_two_half_loaded_workers(server: VLLMProcess, transport: str) -> None:
    old, half, new = (random_model(tied=False, seed=seed) for seed in (10, 11, 12))
    with connect(server, transport) as publisher:
        publisher.publish(30, ModuleSource(old))
        with pytest.raises(InterruptedError):
            publisher.publish(31, CutShort(half))
    with connect(server, transport) as publisher:
        assert publisher.publish(32, ModuleSource(new)).failed == {}
        assert probe(publisher, new).max_abs_diff < TOLERANCE


def test_weights_that_leave_a_matrix_out_are_refused(server: VLLMProcess, transport: str) -> None:
    model = random_model(tied=False, seed=13)

    class Incomplete(ModuleSource):
        def metadata(self) -> list[Any]:
            return [meta for meta in super().metadata() if "1.self_attn.k_proj.weight" not in meta.name]

    with (
        connect(server, transport) as publisher,
        pytest.raises(Exception, match=r"does not fit the server's model.*k_proj"),
    ):
        publisher.publish(40, Incomplete(model))
