"""The user's file with the agent function: compiled once in a process, run anew for every episode.

Used by the agent rollouts and by the check before a run. Running the file is quick where its imports are in
`sys.modules` already; what the file itself computes is computed again. Waits for the user's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import importlib.abc
import importlib.util
import inspect
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pipelinerl.agents.threads import start_thread
from pipelinerl.errors import DomainError

logger = logging.getLogger(__name__)

AGENT_KEY = "actor.agent_func_path"
STEP_SHAPE = "async def step(state, action, label, **kwargs) -> (reward, next_state, done, extra_info)"
# A file that takes longer to run, so many times in a row, holds up the other rollouts of its worker.
_SLOW_S = 0.1
_SLOW_RUNS = 3
# Functions and their globals refer to each other, so only the collector frees a module, and the worker has told it to
# look seldom. A file that makes large things takes its time, so time is the measure.
_COLLECT_AFTER_S = 1.0

Step = Callable[..., Any]


class AgentFile:
    """The compiled file `path`.

    Its folder is put at the end of the Python path, so that it can import what lies beside it.

    Raises:
        DomainError: there is no such file, or it is no Python.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        file = Path(path)
        try:
            source = file.read_bytes()
        except OSError as error:
            reason = "There is no such file." if not file.exists() else f"It cannot be read: {error}."
            raise DomainError(
                f"{AGENT_KEY}: got {path!r}, expected a Python file with {STEP_SHAPE}. {reason}"
            ) from error
        try:
            # What an import does with a file.
            code = importlib.abc.InspectLoader.source_to_code(source, path)
        except (SyntaxError, ValueError) as error:
            message = f"{AGENT_KEY}: {_place(error, path)} cannot be compiled: {type(error).__name__}: {error}."
            raise DomainError(f"{message} Mend the file.") from error
        self._loader = _CompiledLoader(code, source)
        self._names: list[str] = []
        self._num_names = 0
        self._uncollected_s = 0.0
        self._slow_runs = 0
        # What runs in a thread now, by the function that it runs.
        self._running: dict[int, Future[Any]] = {}
        self._num_abandoned = 0
        folder = str(file.absolute().parent)
        if folder not in sys.path:
            sys.path.append(folder)

    @contextlib.contextmanager
    def episode(self) -> Iterator[Step]:
        """Run the file in a module of its own and hand out its `step`.

        The module is in `sys.modules` during the episode (dataclasses and type hints look there), under a name that no
        other running episode has. Names are used again: what is kept by name, such as a logger, stays bounded.

        Raises:
            DomainError: the file has no `step` of three arguments.
            BaseException: whatever running the file raised.
        """
        if self._names:
            name = self._names.pop()
        else:
            self._num_names += 1
            name = f"pipelinerl_agent_func_{self._num_names}"
        step = None
        try:
            step = self._checked_step(self._run(name))
            yield step
        finally:
            running = self._running.get(id(step))
            if running is None:
                self._free(name)
            else:  # the rollout was given up while its step is in a thread, and still looks its module up
                running.add_done_callback(lambda _: self._free(name))

    async def call(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        """Call `step`. A plain function runs in a thread, so that it may block; a coroutine runs on the event loop."""
        if inspect.iscoroutinefunction(step):
            return await step(*args, **kwargs)
        running = start_thread(functools.partial(contextvars.copy_context().run, step, *args, **kwargs))
        self._running[id(step)] = running
        # Before anybody hears of the answer: the next call of this step has its own entry.
        running.add_done_callback(lambda _: self._running.pop(id(step), None))
        try:
            answer = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.running():
                self._tell_abandoned(step)
            raise
        return await answer if inspect.isawaitable(answer) else answer

    def check(self) -> None:
        """Run the file once and look for `step`.

        Raises:
            DomainError: running it failed, or it has no `step` of three arguments.
        """
        try:
            with self.episode():
                pass
        except DomainError:
            raise
        except Exception as error:
            message = f"{AGENT_KEY}: running {_place(error, self.path)} failed: {type(error).__name__}: {error}."
            raise DomainError(f"{message} Mend the file (are its imports complete?).") from error

    def where(self, step: Step) -> str:
        """Return `step of FILE:LINE`, for messages."""
        code = getattr(inspect.unwrap(step), "__code__", None)
        line = f":{code.co_firstlineno}" if code is not None and code.co_filename == self.path else ""
        return f"step of {self.path}{line}"

    def _free(self, name: str) -> None:
        sys.modules.pop(name, None)
        self._names.append(name)

    def _tell_abandoned(self, step: Step) -> None:
        """A thread cannot be ended. Said at the first one, and each time that there were twice as many."""
        self._num_abandoned += 1
        if self._num_abandoned & (self._num_abandoned - 1) == 0:
            logger.warning(
                "%s: a rollout was ended while %s was running; its thread goes on until the function returns (%d so "
                "far in this worker). Give what it waits for a time-out shorter than actor.rollout_timeout_s.",
                AGENT_KEY, self.where(step), self._num_abandoned,
            )  # fmt: skip

    def _run(self, name: str) -> ModuleType:
        if self._uncollected_s > _COLLECT_AFTER_S:
            self._uncollected_s = 0.0
            gc.collect()
        spec = importlib.util.spec_from_file_location(name, self.path, loader=self._loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        started = time.perf_counter()
        self._loader.exec_module(module)
        seconds = time.perf_counter() - started
        self._uncollected_s += seconds
        self._slow_runs = self._slow_runs + 1 if seconds > _SLOW_S else 0
        if self._slow_runs == _SLOW_RUNS:
            logger.warning(
                "%s: running %s takes %.1f s, and each rollout runs it. Move what takes so long into a module that it "
                "imports; that is run once.", AGENT_KEY, self.path, seconds,
            )  # fmt: skip
        return module

    def _checked_step(self, module: ModuleType) -> Step:
        step = getattr(module, "step", None)
        if not callable(step):
            raise DomainError(f"{AGENT_KEY}: {self.path} has no function step, expected {STEP_SHAPE}.")
        try:
            inspect.signature(step).bind_partial("", "", None)
        except TypeError as error:
            raise DomainError(
                f"{AGENT_KEY}: {self.where(step)}: {error}; expected {STEP_SHAPE}. Change its parameters."
            ) from error
        return step  # type: ignore[no-any-return]


@functools.cache
def agent_file(path: str) -> AgentFile:
    """Return the file of this process; it is read and compiled at the first call. Raises DomainError."""
    return AgentFile(path)


class _CompiledLoader(importlib.abc.InspectLoader):
    """Runs the same code in every module that it is asked to fill."""

    def __init__(self, code: CodeType, source: bytes) -> None:
        self._code = code
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source)

    def is_package(self, fullname: str) -> bool:
        return False


def _place(error: BaseException, path: str) -> str:
    """Return `path:line` of the line in the user's file that is to blame, or `path`."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path
