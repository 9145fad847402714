"""The parts of vLLM's engine core that an update uses, and the fake that stands for it in unit tests."""

from __future__ import annotations

import inspect
import queue
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.fake_engine import FakeEngine
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

from pipelinerl.inference.engine import update


@pytest.mark.parametrize("name", ["pause_scheduler", "collective_rpc", "set_weight_version", "resume_scheduler"])
def test_the_fake_takes_what_the_engine_takes(name: str) -> None:
    fake, real = (inspect.signature(getattr(owner, name)).parameters for owner in (FakeEngine, EngineCore))
    assert set(fake) <= set(real)
    assert [real[each].kind for each in fake] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(fake)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_busy_engine_pauses_later_the_latest_call_first(is_busy: bool) -> None:
    def pauses(engine: Any, drain: Any) -> list[Any]:
        futures = [engine.pause_scheduler(mode="keep", clear_cache=False) for _ in range(2)]
        ended: list[int] = []
        for number, future in enumerate(futures):
            if isinstance(future, Future):
                future.add_done_callback(lambda _, number=number: ended.append(number))
        drain()
        return [[type(future) for future in futures], ended]

    states: list[PauseState] = []
    real: Any = EngineCoreProc.__new__(EngineCoreProc)
    real.scheduler = SimpleNamespace(set_pause_state=states.append, has_requests=lambda: is_busy)
    real.model_executor = SimpleNamespace(collective_rpc=lambda method: None)
    real._idle_state_callbacks, real.batch_queue, real.engines_running = [], None, False
    fake = FakeEngine(is_busy)
    assert pauses(real, real._notify_idle_state_callbacks) == pauses(fake, fake.drain)
    assert states == [PauseState.PAUSED_ALL] * 2


class OneRunningRequest:
    """A scheduler that always has something to do, unless it is paused."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_requests(self) -> bool:
        return self.pause_state != PauseState.PAUSED_ALL


@pytest.mark.parametrize("fails", [False, True])
def test_a_busy_engine_goes_on_after_an_update_though_no_call_follows(fails: bool) -> None:
    """The loop looks for work, ends what waits for idleness, and then waits for a call."""

    def answer(method: str, **options: Any) -> None:
        if fails and method == "update_weights":
            raise RuntimeError("disk on fire")

    engine: Any = EngineCoreProc.__new__(EngineCoreProc)
    engine.scheduler, engine.model_executor = OneRunningRequest(), SimpleNamespace(collective_rpc=answer)
    engine.collective_rpc = answer
    engine.batch_queue, engine.engines_running, engine._idle_state_callbacks = deque([1]), False, []
    engine.input_queue, engine.aborts_queue = queue.Queue(), queue.Queue()
    engine.process_input_queue_block, engine.shutdown_state = True, EngineShutdownState.RUNNING
    outcome = update(engine, {}, "7", False, True)
    assert isinstance(outcome, Future) and not outcome.done()
    engine.batch_queue.clear()
    loop = threading.Thread(target=engine._process_input_queue, daemon=True)
    loop.start()
    assert (outcome.exception(60) is not None) == fails
    loop.join(60 if not fails else 1)
    # One that failed stays paused, and waits.
    assert loop.is_alive() == engine.is_scheduler_paused() == fails
    assert engine.has_work() != fails
