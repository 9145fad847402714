"""Our replacement of vLLM's pause does what vLLM's does, but for its sleep."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from pipelinerl.inference.request_scheduler import pause_without_sleep


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**options: Any) -> None:
            self.calls.append((name, options))

        return call


async def calls_of_a_pause(**options: Any) -> list[tuple[str, dict[str, Any]]]:
    recorder = Recorder()
    engine: Any = SimpleNamespace(renderer=recorder, engine_core=recorder)
    await AsyncLLM.pause_generation(engine, **options)
    return recorder.calls


@pytest.mark.parametrize("options", [{"mode": "keep", "clear_cache": False}, {"mode": "keep"}, {}])
async def test_the_same_calls_without_the_sleep(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    original = AsyncLLM.pause_generation
    expected = await calls_of_a_pause(**options)
    monkeypatch.setattr(AsyncLLM, "pause_generation", original)  # restored after the test
    pause_without_sleep()
    parameters = inspect.signature(AsyncLLM.pause_generation).parameters
    assert parameters.keys() == inspect.signature(original).parameters.keys()

    async def no_sleep(seconds: float) -> None:
        raise AssertionError("it sleeps")

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    assert await calls_of_a_pause(**options) == expected
