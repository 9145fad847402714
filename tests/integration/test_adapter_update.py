"""Updates that bring the adapter alone to a real vLLM server, which holds the frozen model: both compute the same."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from fakes.adapter_backend import adapter_backend, draw_adapter
from fakes.mid_sequence import generate_across_updates
from fakes.random_model import model_logprobs, random_ids, random_model, save_random_model
from fakes.static_pool import StaticPool
from fakes.updated_server import PROBED, connect, damage_second_buffer, generate, output_of, sampling
from fakes.vllm_process import VLLMProcess

from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import WeightSync
from pipelinerl.inference.arguments import ROOM_RANKS
from pipelinerl.records.completion import MEDIA_TYPE, decode_completion
from pipelinerl.weights.buffers import ModuleSource, WeightSource
from pipelinerl.weights.manifest import folder_checksum
from pipelinerl.weights.sync import WeightPublisher
from pipelinerl.weights.transport import GroupSender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4
VERSIONS = itertools.count(1)
#: Workers of the server: with two, A and B are sliced between them.
WORKERS = (1, 2)


@pytest.fixture(scope="module", params=WORKERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """A server with room for rank 8, whose base model has an untied head."""
    folder = tmp_path_factory.mktemp("adapter_server")
    model = save_random_model(folder / "model", tied=False)
    kwargs = {} if request.param == 1 else {"tensor-parallel-size": request.param}
    with VLLMProcess(model, folder / "server.log", kwargs, arguments=["--adapter-rank", "5"]) as server:
        yield server


def backend_of(seed: int, dtype: torch.dtype = torch.float32, **lora: Any) -> PlainBackend:
    """A policy on the server's base model with large random A and B, for servers in `dtype`."""
    backend = adapter_backend(dtype, tied=False, **{"alpha": 10.0, **lora})
    draw_adapter(backend, seed)
    return backend


def feed_of(backend: PlainBackend, publisher: WeightPublisher) -> WeightSync:
    return WeightSync(backend, Ranks(), StaticPool(publisher))


def source_of(backend: PlainBackend) -> WeightSource:
    return backend.adapter_source(torch.float32)


def post(server: VLLMProcess, path: str, body: dict[str, Any], accept: str = "*/*") -> bytes:
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json", "Accept": accept}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return bytes(response.read())


def largest_difference(backend: PlainBackend, prompt: list[int], ids: list[int], logprobs: list[float]) -> float:
    expected = model_logprobs(backend.policy.language_model, prompt + ids)[len(prompt) - 1 :]
    return max(abs(a - b) for a, b in zip(logprobs, expected, strict=True))


def test_there_is_room_for_the_ranks_of_vllm() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == ROOM_RANKS


def test_before_the_first_update_the_server_is_its_base_model(server: VLLMProcess) -> None:
    """Has to run first."""
    prompt = random_ids(20, seed=1)
    ids, logprobs = output_of(generate(server, sampling(prompt, 10)))
    base = model_logprobs(random_model(tied=False), prompt + ids)[len(prompt) - 1 :]
    assert max(abs(a - b) for a, b in zip(logprobs, base, strict=True)) < TOLERANCE


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"], ["up_proj", "o_proj"]])
def test_w1_the_server_computes_with_the_adapter(server: VLLMProcess, targets: list[str]) -> None:
    """Fused layers with all and with some of their parts adapted; layers of the update before are 0 again."""
    backend = backend_of(1, target_modules=targets)
    with connect(server, chunk_bytes=3_000) as publisher:
        feed = feed_of(backend, publisher)
        for seed in (2, 3):
            before = feed.probe.sequences(PROBED)
            draw_adapter(backend, seed)
            after = feed.probe.sequences(PROBED)
            # The old weights must be told apart, or the test proves nothing.
            assert mean_difference(before[2].logprobs, after[2].logprobs) > 100 * TOLERANCE
            delivery = feed.send(next(VERSIONS), PROBED)
            assert delivery.probe_abs_diff is not None and delivery.probe_abs_diff < TOLERANCE
            shapes = [p.numel() for p in backend.policy.parameters() if p.requires_grad]
            assert delivery.sent_bytes == 4 * sum(shapes)


def mean_difference(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


@pytest.mark.parametrize(("r", "alpha"), [(1, 3.0), (5, 4.0)])
def test_w1_the_scale_is_alpha_over_r(server: VLLMProcess, r: int, alpha: float) -> None:
    backend = backend_of(4, r=r, alpha=alpha)
    with connect(server) as publisher:
        assert (feed_of(backend, publisher).send(next(VERSIONS), PROBED).probe_abs_diff or 0) < TOLERANCE


def test_every_route_samples_with_the_adapter(server: VLLMProcess) -> None:
    """Token ids as JSON and as arrays, and the API of OpenAI, under the name that requests have always used."""
    backend = backend_of(5)
    with connect(server) as publisher:
        publisher.publish(next(VERSIONS), source_of(backend))
    prompt = random_ids(20, seed=2)
    assert largest_difference(backend, prompt, *output_of(generate(server, sampling(prompt, 20)))) < TOLERANCE
    packed = decode_completion(post(server, "/inference/v1/generate", sampling(prompt, 20), MEDIA_TYPE))
    ids = torch.frombuffer(bytearray(packed.token_ids), dtype=torch.int32).tolist()
    logprobs = torch.frombuffer(bytearray(packed.logprobs or b""), dtype=torch.float32).tolist()
    assert largest_difference(backend, prompt, ids, logprobs) < TOLERANCE
    body = {"model": "actor", "prompt": prompt, "max_tokens": 8, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    (choice,) = json.loads(post(server, "/v1/completions", {**body, "return_token_ids": True}))["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    assert largest_difference(backend, prompt, choice["token_ids"], logprobs) < TOLERANCE


def test_w3_prefix_cache_entries_never_cross_an_update(server: VLLMProcess) -> None:
    """The same prompt of four full cache blocks before and after."""
    prompt = random_ids(140, seed=5)
    old, new = backend_of(6), backend_of(7)
    with connect(server) as publisher:
        for backend in (old, new, old):
            publisher.publish(next(VERSIONS), source_of(backend))
            for _ in range(2):
                assert (
                    largest_difference(backend, prompt, *output_of(generate(server, sampling(prompt, 8)))) < TOLERANCE
                )


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_a_sequence_that_crosses_an_update_goes_on_with_the_new_adapter(server: VLLMProcess, kv_cache: Any) -> None:
    old, new = backend_of(8), backend_of(9)
    body = sampling(random_ids(12, seed=6), 400)
    with connect(server, kv_cache=kv_cache) as publisher:

        def generate_with_old() -> dict[str, Any]:
            publisher.publish(next(VERSIONS), source_of(old))
            return generate(server, body)

        answer = generate_across_updates(
            server, generate_with_old, lambda attempt: publisher.publish(next(VERSIONS), source_of(new))
        )
    first, second = answer["choices"][0]["weight_versions"]
    assert int(second["version"]) == int(first["version"]) + 1
    ids, logprobs = output_of(answer)
    start, prompt = second["start"], body["token_ids"]
    before = largest_difference(old, prompt, ids[:start], logprobs[:start])
    after = largest_difference(new, prompt + ids[:start], ids[start:], logprobs[start:])
    assert before < TOLERANCE
    assert after < TOLERANCE if kv_cache == "recompute" else after > 100 * TOLERANCE


def test_a_damaged_adapter_is_not_used_and_sent_again(server: VLLMProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(10)
    with connect(server, chunk_bytes=3_000) as publisher:
        damage_second_buffer(monkeypatch, GroupSender)
        report = publisher.publish(next(VERSIONS), source_of(backend))
        assert report.failed == {} and "buffer 2 of" in str(report.updated[0].recovered_from)
        assert (feed_of(backend, publisher).send(next(VERSIONS), PROBED).probe_abs_diff or 0) < TOLERANCE


def test_what_does_not_fit_is_refused_before_anything_is_paused(server: VLLMProcess) -> None:
    with connect(server) as publisher:
        with pytest.raises(WeightSyncError, match=r"got rank 9, the server has room for 8"):
            publisher.publish(next(VERSIONS), source_of(backend_of(11, r=9)))
        with pytest.raises(WeightSyncError, match=r"is not part of an adapter"):
            publisher.publish(next(VERSIONS), ModuleSource(random_model(tied=False)))
        with pytest.raises(WeightSyncError, match=r"vllm_config.vllm_kwargs.dtype=bfloat16"):
            publisher.publish(next(VERSIONS), backend_of(11).adapter_source(torch.bfloat16))
    base = folder_checksum(server.model)
    assert base is not None
    refused = pytest.raises(WeightSyncError, match=r"other weights than the trainer read")
    with connect(server, base_checksum="another") as publisher, refused:
        publisher.publish(next(VERSIONS), source_of(backend_of(11)))
    with connect(server, base_checksum=base) as publisher:
        backend = backend_of(12)
        assert (feed_of(backend, publisher).send(next(VERSIONS), PROBED).probe_abs_diff or 0) < TOLERANCE


def test_a_bf16_server_agrees_within_its_precision(tmp_path: Path) -> None:
    """The base model is rounded by both, and A and B arrive as the trainer multiplies them: alpha / r = 4."""
    model = save_random_model(tmp_path / "model", tied=False)
    kwargs = {"dtype": "bfloat16"}
    backend = backend_of(13, torch.bfloat16, alpha=16)
    arguments = ["--adapter-rank", "4"]
    with (
        VLLMProcess(model, tmp_path / "log", kwargs, arguments=arguments) as server,
        connect(server) as publisher,
    ):
        feed = feed_of(backend, publisher)
        before = feed.probe.sequences(PROBED)[2].logprobs
        draw_adapter(backend, 14)
        after = feed.probe.sequences(PROBED)[2].logprobs
        difference = feed.send(next(VERSIONS), PROBED).probe_abs_diff
    assert difference is not None and difference < 0.05
    assert mean_difference(before, after) > 0.5
