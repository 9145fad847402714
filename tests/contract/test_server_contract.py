"""The fake server and the real one answer alike: the same assertions on both."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.fake_server import FakeServer
from fakes.mid_sequence import generate_across_updates
from fakes.random_model import random_ids, random_model
from fakes.updated_server import connect, publish, with_client
from fakes.vllm_process import VLLMProcess

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.buffers import ModuleSource, TensorMeta, update_info_of
from pipelinerl.weights.link import UPDATE_PATH, ControlClient, control_session
from pipelinerl.weights.manifest import read_manifest

Server = FakeServer | VLLMProcess


@pytest.fixture(params=["fake", "real"])
def server(request: pytest.FixtureRequest, tiny_server: VLLMProcess) -> Iterator[Server]:
    if request.param == "real":
        yield tiny_server
        return
    manifest = read_manifest(tiny_server.model)
    with FakeServer(manifest, tied=True, token_delay_s=0.005) as fake:
        yield fake


def call(server: Server, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data=data, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=300) as response:
            text = response.read()
            return response.status, json.loads(text) if text else {}
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def generate(server: Server, max_tokens: int = 8, **params: Any) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **params}
    body = {"model": "actor", "token_ids": random_ids(12, seed=1), "sampling_params": sampling}
    status, answer = call(server, "POST", "/inference/v1/generate", body, server.token)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("token", [None, "", "wrong-token-wrong-token"])
@pytest.mark.parametrize(
    "path",
    ["/pause", UPDATE_PATH, "/collective_rpc", "/inference/v1/generate"],
)
def test_no_token_no_answer(server: Server, path: str, token: str | None) -> None:
    assert call(server, "POST", path, {}, token)[0] == 401
    assert call(server, "GET", "/health")[0] == 200


def test_generation_returns_ids_logprobs_and_spans(server: Server) -> None:
    publish(server, 3, random_model())
    answer = generate(server, max_tokens=8)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 8
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert all(entry["logprob"] <= 0 for entry in entries)
    assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20} | {
        key: value for key, value in answer["usage"].items() if key.endswith("_details")
    }


def test_prompt_logprobs_have_one_entry_per_token_and_none_for_the_first(server: Server) -> None:
    ids = random_ids(12, seed=1)
    entries = generate(server, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert entries[0] is None
    assert [str(token) in entry for token, entry in zip(ids[1:], entries[1:], strict=True)] == [True] * 11


def test_an_empty_prompt_is_a_client_error(server: Server) -> None:
    body = {"model": "actor", "token_ids": [], "sampling_params": {"max_tokens": 1}}
    assert call(server, "POST", "/inference/v1/generate", body, server.token)[0] == 400


def test_an_update_in_mid_sequence_shows_as_spans(server: Server) -> None:
    publish(server, 10, random_model())
    last = {}
    with connect(server) as publisher:

        def update_twice(attempt: int) -> None:
            for version in (11 + 2 * attempt, 12 + 2 * attempt):
                assert publisher.publish(version, ModuleSource(random_model(seed=version))).failed == {}
            last["version"] = str(12 + 2 * attempt)

        answer = generate_across_updates(server, lambda: generate(server, max_tokens=480), update_twice)
    (choice,) = answer["choices"]
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans][-1] == last["version"]
    assert len(spans) >= 2
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == len(choice["token_ids"]) == 480
    assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))


def test_a_paused_server_answers_only_after_an_update(server: Server) -> None:
    assert call(server, "POST", "/pause?mode=keep&clear_cache=false", token=server.token)[0] == 200
    assert call(server, "GET", "/is_paused", token=server.token) == (200, {"is_paused": True})
    answers: list[dict[str, Any]] = []
    request = threading.Thread(target=lambda: answers.append(generate(server)))
    request.start()
    request.join(0.5)
    assert answers == []
    publish(server, 17, random_model())
    request.join(300)
    (choice,) = answers[0]["choices"]
    assert choice["weight_versions"] == [{"version": "17", "start": 0, "end": 8}]


async def test_w1_an_incomplete_update_fails_and_a_complete_one_repairs_it(server: Server) -> None:
    """The call as a sender without checks of its own would make it."""
    metas = ModuleSource(random_model()).metadata()
    async with control_session(server.token) as session:
        client = ControlClient(session, "server", server.url)
        with pytest.raises(WeightSyncError, match="500"):
            await client.post(UPDATE_PATH, json={"weight_version": "1"})
        await client.worker_call("pipelinerl_abort_update")
        info = update_info_of(metas, 1000, pass_id=1)
        body = {"update_info": info, "weight_version": "1", "kv_cache": "keep", "resumes": True}
        with pytest.raises(WeightSyncError, match="not initialized"):
            await client.post(UPDATE_PATH, json=body)
        assert await client.get("/is_paused") == {"is_paused": True}
        assert await client.get("/get_world_size") == {"world_size": 1}
    await asyncio.to_thread(publish, server, 21, random_model())
    assert generate(server)["choices"][0]["weight_versions"][0]["version"] == "21"


def test_model_info_describes_the_checkpoint(server: Server) -> None:
    info = with_client(server, lambda client: client.worker_call("pipelinerl_model_info"))
    shapes = {meta.name: list(meta.shape) for meta in ModuleSource(random_model()).metadata()}
    others = {"adapter_rank": None, "base_checksum": None, "rounded": []}
    assert info == {"tensors": shapes, "tied": True, "dtype": "float32", **others}
    assert TensorMeta("lm_head.weight", random_model().dtype, (1,)).name not in shapes
