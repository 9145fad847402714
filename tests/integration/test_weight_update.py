"""Weight updates of a real vLLM server: what it computes after one is what the trainer computes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from fakes.limits import PROCESS_LIMIT_S
from fakes.mid_sequence import ATTEMPTS, generate_across_updates, num_running
from fakes.random_model import model_logprobs, perturb, random_ids, random_model, save_random_model
from fakes.updated_server import CutShort, connect, generate, output_of, probe, sampling, with_client
from fakes.vllm_process import VLLMProcess

from pipelinerl.weights.buffers import (
    DEFAULT_CHUNK_BYTES,
    ModuleSource,
    TensorMeta,
    mark_of,
    pack,
    payload_bytes,
    plan_chunks,
    update_info_of,
)
from pipelinerl.weights.link import UPDATE_PATH, ControlClient, control_session
from pipelinerl.weights.sync import WeightPublisher
from pipelinerl.weights.transport import GroupSender, SenderOptions, open_sender

TOLERANCE = 1e-4


def assert_parity(server: VLLMProcess, chunk_bytes: int, model: torch.nn.Module) -> None:
    with connect(server, chunk_bytes=chunk_bytes) as publisher:
        publisher.publish(0, ModuleSource(model))
        assert probe(publisher, model).max_abs_diff < TOLERANCE
        for version in (1, 2, 3):
            perturb(model, seed=version)
            # The old weights must be told apart, or the test proves nothing.
            assert probe(publisher, model).mean_abs_diff > 100 * TOLERANCE
            report = publisher.publish(version, ModuleSource(model))
            assert report.failed == {}
            assert probe(publisher, model).max_abs_diff < TOLERANCE


@pytest.mark.parametrize("chunk_bytes", [10_000, 2**28])
def test_w1_tied_model_agrees_after_every_update(tiny_server: VLLMProcess, chunk_bytes: int) -> None:
    assert_parity(tiny_server, chunk_bytes, random_model(tied=True, seed=5))


@pytest.mark.slow
def test_untied_model_agrees_after_every_update(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", tied=False)
    with VLLMProcess(model, tmp_path / "server.log") as server:
        assert_parity(server, 10_000, random_model(tied=False, seed=5))


@pytest.mark.slow
def test_compiled_bf16_server_agrees_within_its_precision(tmp_path: Path) -> None:
    """With torch.compile on, and weights cast on the wire; bf16 has 8 bits of mantissa."""
    folder = save_random_model(tmp_path / "model", tied=True)
    kwargs = {"enforce-eager": False, "dtype": "bfloat16"}
    model = random_model(tied=True, seed=6)
    with VLLMProcess(folder, tmp_path / "server.log", kwargs) as server, connect(server) as publisher:
        for version in range(3):
            perturb(model, seed=version)
            assert publisher.publish(version, ModuleSource(model, dtype=torch.bfloat16)).failed == {}
            assert probe(publisher, model).mean_abs_diff < 0.1


@pytest.mark.slow
def test_a_float16_server_agrees_within_its_precision(tmp_path: Path) -> None:
    """Weights travel in the server's dtype, or in fp32 and are cast there; float16 has 11 bits of mantissa."""
    folder = save_random_model(tmp_path / "model", tied=True)
    model = random_model(tied=True, seed=6)
    with VLLMProcess(folder, tmp_path / "server.log", {"dtype": "float16"}) as server, connect(server) as publisher:
        differences = []
        for version, dtype in enumerate((torch.float16, torch.float32)):
            perturb(model, seed=4)
            assert publisher.publish(version, ModuleSource(model, dtype=dtype)).failed == {}
            result = probe(publisher, model)
            assert result.server_dtype == "float16"
            differences.append(result.mean_abs_diff)
        assert max(differences) < 0.01


def test_t3_sampled_logprobs_are_those_of_the_trainer_at_the_sampling_temperature(tiny_server: VLLMProcess) -> None:
    model = random_model(seed=8)
    with connect(tiny_server) as publisher:
        publisher.publish(0, ModuleSource(model))
    prompt = random_ids(20, seed=3)
    answer = generate(tiny_server, sampling(prompt, 40, temperature=0.6))
    ids, logprobs = output_of(answer)
    expected = model_logprobs(model, prompt + ids, temperature=0.6)[len(prompt) - 1 :]
    assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) < TOLERANCE


def send_without_checks(server: VLLMProcess, model: torch.nn.Module, keep: Any) -> None:
    """An update by a sender that does not compare names: the tensors that `keep` accepts."""

    async def run(client: ControlClient) -> None:
        tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters() if keep(name)]
        sender, pass_id = open_sender(SenderOptions("gloo", "127.0.0.1", None, 60)), 7
        await client.worker_call("pipelinerl_abort_update")
        details = sender.prepare(1)
        joining = client.post("/init_weight_transfer_engine", json={"init_info": {"details": details}})
        await asyncio.gather(joining, asyncio.to_thread(sender.join))
        metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        buffer = pack([tensor for _, tensor in tensors], mark_of(pass_id, 0, payload_bytes(metas)))
        info = update_info_of(metas, DEFAULT_CHUNK_BYTES, pass_id)
        body = {"update_info": info, "weight_version": "99", "kv_cache": "keep", "resumes": True}
        await asyncio.gather(client.post(UPDATE_PATH, json=body), asyncio.to_thread(sender.send, buffer))

    with_client(server, run)


@pytest.mark.parametrize(
    "left_out", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_w1_a_tensor_left_out_fails_the_update_and_the_next_one_repairs_it(
    tiny_server: VLLMProcess, left_out: str
) -> None:
    model = random_model(seed=9)
    with pytest.raises(Exception, match=f"{UPDATE_PATH} answered 500"):
        send_without_checks(tiny_server, model, lambda name: name != left_out)
    assert "without all of their weights" in tiny_server.tail(20_000)
    with connect(tiny_server) as publisher:
        assert publisher.publish(1, ModuleSource(model)).failed == {}
        assert probe(publisher, model).max_abs_diff < TOLERANCE


def test_l2_a_restarted_trainer_repairs_a_half_loaded_server_and_running_requests_survive(
    tiny_server: VLLMProcess,
) -> None:
    """The buffered q and k of a half-loaded layer must not be mistaken for those of the next update."""
    old, half, new = random_model(seed=10), random_model(seed=11), random_model(seed=12)
    answers: list[dict[str, Any]] = []
    body = sampling(random_ids(12, seed=4), 400, temperature=0.6)
    request = threading.Thread(target=lambda: answers.append(generate(tiny_server, body)))
    with connect(tiny_server, chunk_bytes=10_000) as publisher:
        publisher.publish(30, ModuleSource(old))
        request.start()
        while request.is_alive() and num_running(tiny_server) == 0:
            pass
        with pytest.raises(InterruptedError):
            publisher.publish(31, CutShort(half))
    with connect(tiny_server, chunk_bytes=10_000) as publisher:
        assert publisher.publish(32, ModuleSource(new)).failed == {}
        assert probe(publisher, new).max_abs_diff < TOLERANCE
    request.join(PROCESS_LIMIT_S)
    (choice,) = answers[0]["choices"]
    assert len(choice["token_ids"]) == 400
    assert {span["version"] for span in choice["weight_versions"]} <= {"30", "32"}


class DamagingSend:
    """Stands for `GroupSender.send`: the second buffer of each of the first `passes` passes arrives as zeros."""

    def __init__(self, buffers_per_pass: int, passes: int) -> None:
        self._send = GroupSender.send
        self._buffers_per_pass, self._passes, self.sent = buffers_per_pass, passes, 0

    def __call__(self, sender: GroupSender, buffer: torch.Tensor) -> None:
        of_pass, index = divmod(self.sent, self._buffers_per_pass)
        self.sent += 1
        damaged = of_pass < self._passes and index == 1
        self._send(sender, torch.zeros_like(buffer) if damaged else buffer)


def test_w1_buffers_that_arrive_as_zeros_are_not_loaded_and_good_ones_repair_the_server(
    tiny_server: VLLMProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = random_model(seed=18), random_model(seed=19)
    metas = ModuleSource(new).metadata()
    buffers = len(list(plan_chunks(metas, 10_000)))
    message = f"buffer 2 of {buffers} arrived damaged"

    async def is_paused(client: ControlClient) -> bool:
        return bool((await client.get("/is_paused"))["is_paused"])

    def damage(patch: pytest.MonkeyPatch, passes: int) -> DamagingSend:
        wire = DamagingSend(buffers, passes)
        patch.setattr(GroupSender, "send", lambda sender, buffer: wire(sender, buffer))
        return wire

    def times_logged() -> int:
        return tiny_server.tail(10**9).count(message)

    logged = times_logged()

    with connect(tiny_server, chunk_bytes=10_000) as publisher:
        assert publisher.publish(60, ModuleSource(old)).failed == {}
        with monkeypatch.context() as patch:
            wire = damage(patch, passes=1)
            report = publisher.publish(61, ModuleSource(new))
        assert report.failed == {} and report.updated[0].recovered_from
        # The server took the whole pass although it had given it up: nobody was left in a broadcast.
        assert wire.sent == 2 * buffers
        assert probe(publisher, new).max_abs_diff < TOLERANCE
        logged_once = times_logged()
        assert logged_once > logged
        with monkeypatch.context() as patch:
            damage(patch, passes=2)
            assert list(publisher.publish(62, ModuleSource(old)).failed) == ["tiny"]
    assert times_logged() > logged_once
    assert with_client(tiny_server, is_paused)
    with connect(tiny_server, chunk_bytes=10_000) as publisher:
        assert publisher.publish(63, ModuleSource(old)).failed == {}
        assert probe(publisher, old).max_abs_diff < TOLERANCE
    assert not with_client(tiny_server, is_paused)


def assert_pure(answer: dict[str, Any], prompt: list[int], version: str, model: torch.nn.Module) -> None:
    """All tokens are of `version`, with the log-probs of a full forward pass of `model`."""
    assert [span["version"] for span in answer["choices"][0]["weight_versions"]] == [version]
    ids, logprobs = output_of(answer)
    expected = model_logprobs(model, prompt + ids)[len(prompt) - 1 :]
    assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_w3_requests_that_start_after_an_update_match_the_new_weights(tiny_server: VLLMProcess, kv_cache: str) -> None:
    """Prefix cache on, other requests running: neither requests that were queued during the pause nor later ones hit
    cache entries of the old weights. All share a prompt of 4 full cache blocks that the old weights have cached."""
    prompt = random_ids(140, seed=5)
    old, new = random_model(seed=13), random_model(seed=14)
    body = sampling(prompt, 16)

    async def run(client: ControlClient) -> bool:
        """Whether the other requests were running at the update."""
        before, after = next(versions), next(versions)
        await asyncio.to_thread(publisher.publish, before, ModuleSource(old))
        running = [asyncio.create_task(client.generate(sampling(prompt, 340, temperature=0.6))) for _ in range(4)]
        assert_pure(await client.generate(body), prompt, str(before), old)
        await client.pause()
        queued = [asyncio.create_task(client.generate(body)) for _ in range(8)]
        # The requests reach the scheduler's queue before the update starts, or the test would show less.
        await asyncio.sleep(0.5)
        assert (await asyncio.to_thread(publisher.publish, after, ModuleSource(new))).failed == {}
        later = [asyncio.create_task(client.generate(body)) for _ in range(8)]
        for answer in await asyncio.gather(*queued, *later):
            assert_pure(answer, prompt, str(after), new)
        spans = [answer["choices"][0]["weight_versions"] for answer in await asyncio.gather(*running)]
        return all([span["version"] for span in own] == [str(before), str(after)] for own in spans)

    versions = itertools.count(41)
    with connect(tiny_server, kv_cache=kv_cache) as publisher:
        # A test process that was held up finds the requests done: that shows nothing, so it is tried again.
        assert any(with_client(tiny_server, run) for _ in range(ATTEMPTS))


def test_recompute_gives_the_new_policy_from_the_first_new_token(tiny_server: VLLMProcess) -> None:
    """A sequence that crosses an update: with `recompute` its later tokens match a full forward pass, with `keep` the
    old KV stays, so they do not."""
    differences = {}
    versions = itertools.count(50)
    old, new = random_model(seed=16), random_model(seed=17)
    body = sampling(random_ids(12, seed=6), 480)
    for kv_cache in ("recompute", "keep"):
        with connect(tiny_server, kv_cache=kv_cache) as publisher:

            def generate_with_old(publisher: WeightPublisher = publisher) -> dict[str, Any]:
                publisher.publish(next(versions), ModuleSource(old))
                return generate(tiny_server, body)

            def update(attempt: int, publisher: WeightPublisher = publisher) -> None:
                publisher.publish(next(versions), ModuleSource(new))

            answer = generate_across_updates(tiny_server, generate_with_old, update)
        first, second = answer["choices"][0]["weight_versions"]
        assert int(second["version"]) == int(first["version"]) + 1
        ids, logprobs = output_of(answer)
        full = body["token_ids"] + ids
        expected = model_logprobs(new, full)[len(body["token_ids"]) - 1 :]
        start = second["start"]
        after = [abs(a - b) for a, b in zip(logprobs[start:], expected[start:], strict=True)]
        differences[kv_cache] = max(after)
    assert differences["recompute"] < TOLERANCE
    assert differences["keep"] > 100 * TOLERANCE


def test_w4_no_route_but_health_opens_without_the_token(tiny_server: VLLMProcess) -> None:
    """Every route that the server lists, and paths that mounted applications serve."""

    async def run() -> None:
        async with control_session(tiny_server.token) as session, aiohttp.ClientSession() as stranger:
            async with session.get(f"{tiny_server.url}/openapi.json") as response:
                paths = (await response.json())["paths"]
            routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
            assert ("POST", "/pause") in routes
            assert len(routes) > 30
            for method, path in [*routes, ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs")]:
                async with stranger.request(method, f"{tiny_server.url}{path}") as response:
                    assert response.status == (200 if path == "/health" else 401), (method, path)

    asyncio.run(run())


def test_forked_processes_leave_the_port_to_the_server(tiny_server: VLLMProcess) -> None:
    """One that outlives its server would keep the next one from listening there."""

    def listens(process: psutil.Process) -> bool:
        return any(each.laddr.port == tiny_server.port for each in process.net_connections() if each.status == "LISTEN")

    server = psutil.Process(tiny_server.pid)
    below = server.children(recursive=True)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in below)
    assert [process.pid for process in (server, *below) if listens(process)] == [server.pid]
