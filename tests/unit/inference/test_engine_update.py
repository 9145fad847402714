"""An update as one call of the engine: the order of its parts, and what it leaves after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.fake_engine import FakeEngine

from pipelinerl.inference.engine import UpdateRoute, update
from pipelinerl.weights.link import UPDATE_PATH
from pipelinerl.weights.sync import PHASES

INFO = {"tensors": [], "chunk_bytes": 1, "pass_id": 2}
PARTS = ["start_weight_update", "update_weights", "finish_weight_update"]


LOADED = [PARTS[0], (PARTS[1], {"update_info": INFO}), PARTS[2], ("version", "7")]


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("clears_cache", [False, True])
def test_an_engine_updates_once_no_step_is_in_progress(is_busy: bool, resumes: bool, clears_cache: bool) -> None:
    engine = FakeEngine(is_busy)
    seconds = update(engine, INFO, "7", clears_cache, resumes)
    if isinstance(seconds, Future):
        assert is_busy and engine.calls == [("pause", "keep", clears_cache)]
        engine.drain()
        seconds = seconds.result(0)
    assert engine.calls == [("pause", "keep", clears_cache), *LOADED, *(["resume"] if resumes else [])]
    assert list(seconds) == list(PHASES) and min(seconds.values()) >= 0


def test_an_adapter_is_loaded_before_the_version_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.inference.engine.serves_adapter", lambda environ: True)
    engine = FakeEngine()
    update(engine, INFO, "7", False, True)
    assert engine.calls[1:] == [*LOADED[:3], "pipelinerl_load_adapter", ("version", "7"), "resume"]


def outcome(engine: FakeEngine, call: Callable[[], Any]) -> str:
    """The error of an update."""
    with pytest.raises(RuntimeError) as caught:
        seconds = call()
        engine.drain()
        seconds.result(0)
    return str(caught.value)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_an_engine_that_failed_an_update_stays_paused(part: str, is_busy: bool) -> None:
    engine = FakeEngine(is_busy, failing=part)
    assert outcome(engine, lambda: update(engine, INFO, "7", False, True)) == "disk on fire"
    assert "resume" not in engine.calls and ("version", "7") not in engine.calls


def test_an_update_that_was_given_up_before_it_began_does_not_take_the_buffers_of_the_next() -> None:
    engine = FakeEngine(is_busy=True)
    given_up = update(engine, INFO, "6", False, True)
    second = update(engine, INFO, "7", False, True)
    engine.drain()
    assert isinstance(second, Future) and second.result(0)
    assert isinstance(given_up, Future) and isinstance(given_up.exception(0), RuntimeError)
    assert engine.calls[2:] == [*LOADED, "resume"]


class FakeClient:
    """Of the engine in the API's process: notes what it is asked for."""

    def __init__(self, num_engines: int, fails: bool) -> None:
        self.calls: list[Any] = []
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=num_engines))
        self.engine_core = self.renderer = self
        self._fails = fails

    async def call_utility_async(self, method: str, *what: Any) -> dict[str, float]:
        self.calls.append((method, *what))
        if self._fails:
            raise RuntimeError("disk on fire")
        return dict.fromkeys(PHASES, 0.5)

    async def clear_mm_cache_async(self) -> None:
        self.calls.append("clear")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


async def respond(client: FakeClient, body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and content of what the route answers."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    async def other(*_: Any) -> None:
        raise AssertionError("another route was called")

    scope = {"type": "http", "path": UPDATE_PATH, "method": "POST", "headers": []}
    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    await UpdateRoute(other)({**scope, "app": app}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_several_engines_resume_when_all_of_them_were_updated(
    num_engines: int, resumes: bool, fails: bool, kv_cache: str
) -> None:
    client = FakeClient(num_engines, fails)
    body = {"update_info": INFO, "weight_version": "7", "kv_cache": kv_cache, "resumes": resumes}
    status, content = await respond(client, json.dumps(body).encode())
    clears = kv_cache == "recompute"
    call = ("pipelinerl_update", INFO, "7", clears, resumes and num_engines == 1)
    last = ["resume"] if resumes and num_engines == 2 and not fails else []
    assert client.calls == [*(["clear"] if clears else []), call, *last]
    assert status == (500 if fails else 200)
    assert ("disk on fire" in content["error"]["message"]) if fails else (list(content["seconds"]) == list(PHASES))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"kv_cache": "keep"}'])
async def test_what_is_no_update_reaches_no_engine(body: bytes) -> None:
    client = FakeClient(1, fails=False)
    status, _ = await respond(client, body)
    assert (status, client.calls) == (500, [])
