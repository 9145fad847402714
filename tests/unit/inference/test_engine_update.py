"""An update as one call of the engine: the order of its parts, and what it leaves after a failure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fakes.fake_engine import FakeEngine

from pipelinerl.inference.engine_update import update
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
    monkeypatch.setattr("pipelinerl.inference.engine_update.serves_adapter", lambda environ: True)
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
