"""A real server whose requests start in batches gives the tokens that it gives one request alone, also over a pause."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes.random_model import save_random_model
from fakes.vllm_process import VLLMProcess

from pipelinerl.inference.admission import WAIT_STEPS_VARIABLE

pytestmark = pytest.mark.slow
REQUESTS, CLIENTS, LIMIT_S = 160, 64, 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    folder = tmp_path_factory.mktemp("batched_start_server")
    model = save_random_model(folder / "model", tied=True)
    with VLLMProcess(model, folder / "server.log", environ={**os.environ, WAIT_STEPS_VARIABLE: "8"}) as running:
        yield running


def post(server: VLLMProcess, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        server.url + path,
        data=json.dumps(body).encode() if body is not None else b"",
        headers={"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LIMIT_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def answer(server: VLLMProcess, number: int) -> list[int]:
    """Greedy tokens for a prompt of its own; one in ten is eleven times as long as the others."""
    length = 110 if number % 10 == 0 else 10
    body = {
        "model": "actor",
        "token_ids": [3 + (7 * number + place) % 190 for place in range(12 + number % 5)],
        "sampling_params": {"max_tokens": length, "temperature": 0.0, "ignore_eos": True, "logprobs": 0},
    }
    tokens: list[int] = post(server, "/inference/v1/generate", body)["choices"][0]["token_ids"]
    assert len(tokens) == length
    return tokens


def test_tokens_are_those_of_each_request_alone(server: VLLMProcess) -> None:
    assert "requests start several at once, after 8 steps at the latest" in server.log.read_text(errors="replace")
    alone = [answer(server, number) for number in range(0, REQUESTS, 8)]  # nothing else runs: nothing is held back
    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda number: answer(server, number), range(REQUESTS)))
        assert together[::8] == alone
        # Again, with pauses in the middle that keep the caches; the weights stay as they are.
        futures = [pool.submit(answer, server, number) for number in range(REQUESTS)]
        for done in (20, 60, 100):
            futures[done].result(LIMIT_S)
            post(server, "/pause?mode=keep&clear_cache=false")
            post(server, "/resume")
        assert [future.result(LIMIT_S) for future in futures] == together
