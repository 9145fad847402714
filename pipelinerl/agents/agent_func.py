"""Agent functions: `step(state, action, label, **kwargs)` in a user's file, named by `actor.agent_func_path`.

The file is compiled once per process and run anew for every episode, so that its globals belong to that episode.
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
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import aiohttp

from pipelinerl.agents.user_threads import start_thread
from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.llm.chat import continue_ids, without_sampled_stop
from pipelinerl.llm.client import generate
from pipelinerl.llm.sample_builder import Transcript, checked_reward
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

logger = logging.getLogger(__name__)

AGENT_KEY = "actor.agent_func_path"
STEP_SHAPE = "async def step(state, action, label, **kwargs) -> (reward, next_state, done, extra_info)"
# A file that runs longer than this, so many times in a row, delays the other rollouts of its worker.
_SLOW_S = 0.1
_SLOW_RUNS = 3
# Functions and their globals form cycles, so only the garbage collector frees a module, and workers collect rarely.
# Files that create large objects take long to run, so the time spent in files decides when to collect.
_COLLECT_AFTER_S = 1.0
_RESERVED_METRICS = frozenset(("reward", "success", "no_error", "no_answer", "num_steps", "context_full"))

Step = Callable[..., Any]


async def generate_agent_rollout(
    cfg: Any, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Play one episode: sample an action, call `step`, continue with its next state until it is done.

    `problem` has `state` (the prompt text) and `label`. Token ids are kept where the next state begins with state +
    action; otherwise a new sample starts. Every sample gets the reward of the rollout (`agent.reward`). An episode that
    fills the context ends there.

    Raises:
        DomainError: the function returned something of another shape.
        RolloutError: the prompt fills the context, or a reward is not a finite number (`bad_reward`).
    """
    started = time.monotonic()
    file = agent_file(str(cfg.actor.agent_func_path))
    with file.episode() as step:
        episode = await _play(file, step, cfg, llm, problem, session)
    total = episode.rewards[-1] if cfg.agent.reward == "last" else math.fsum(episode.rewards)
    success = bool(episode.extra.pop("success", total > 0))
    extra = {f"extra_{name}" if name in _RESERVED_METRICS else name: value for name, value in episode.extra.items()}
    own = {"num_steps": len(episode.rewards), "context_full": episode.context_full}
    return RolloutResult(
        training_texts=episode.training_texts(total),
        metrics=BaseMetrics.model_validate({"reward": total, "success": success, **own, **extra}),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )


def check_config(config: RunConfig) -> None:
    """Check before a run that the file runs and has a `step`. Raises DomainError."""
    agent_file(str(config.actor.agent_func_path)).check()


# The registry calls this when it looks up the rollout function.
generate_agent_rollout.check_config = check_config  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Episode:
    """Result of an episode. `context_full`: it ended because there was no room for another action."""

    transcripts: list[Transcript]
    rewards: list[float] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    context_full: bool = False

    def training_texts(self, reward: float) -> list[TrainingText]:
        texts = [transcript.training_text(reward) for transcript in self.transcripts if transcript.turns]
        if self.context_full:
            # Like an answer at its length limit: `overlong_filtering` may leave it out.
            texts[-1].finished, texts[-1].finish_reason = False, "length"
        return texts


async def _play(
    file: AgentFile, step: Step, cfg: Any, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> _Episode:
    options = _accepted(step, {"sampling_params": dict(llm.parameters)})
    renderer = llm.renderer
    state, label = str(problem["state"]), problem.get("label")
    ids = renderer.encode_prompt(state)
    episode = _Episode([Transcript()])
    for _ in range(cfg.agent.max_steps):
        try:
            call = await generate(llm, Prompt(token_ids=ids), state, ids, session)
        except RolloutError as error:
            if error.reason != "context_overflow" or not episode.rewards:
                raise
            episode.context_full = True
            break
        if cfg.agent.action_special_tokens:
            call.output_text = renderer.decode(call.output_token_ids, skip_special_tokens=False)
        action = call.output_text
        episode.transcripts[-1].add(call, state + action)
        answer = await file.call(step, state, action, label, **options)
        reward, next_state, done, extra = read_step(answer, file.where(step))
        episode.rewards.append(reward)
        episode.extra.update(extra)
        if done:
            break
        if next_state.startswith(state + action):
            rest = next_state[len(state) + len(action) :]
            if cfg.agent.action_special_tokens:  # the action is all that was sampled
                new_ids = renderer.encode_after(action, rest)
            else:
                rest = without_sampled_stop(renderer, call, llm.parameters.get("stop"), rest)
                new_ids = continue_ids(renderer, call, action, rest)
            ids = [*episode.transcripts[-1].ids, *new_ids]
        else:
            episode.transcripts.append(Transcript())
            ids = renderer.encode_prompt(next_state)
        state = next_state
    return episode


def read_step(answer: Any, where: str) -> tuple[float, str, bool, dict[str, float]]:
    """Return reward, next state, done and the numbers in `extra_info`, which may be missing.

    Args:
        answer: what `step` returned.
        where: the function, for messages.

    Raises:
        DomainError: it has another shape.
        RolloutError: `bad_reward`.
    """
    if not isinstance(answer, tuple | list) or len(answer) not in (3, 4):
        raise DomainError(
            f"{AGENT_KEY}: {where} returned {str(answer)[:80]!r}, expected (reward, next_state, done, extra_info)."
        )
    reward, next_state, done = answer[:3]
    extra = answer[3] if len(answer) == 4 else {}
    if not isinstance(next_state, str):
        raise DomainError(
            f"{AGENT_KEY}: {where} returned a next_state of type {type(next_state).__name__}, expected text."
        )
    numbers = {}
    for name, value in (extra if isinstance(extra, dict) else {}).items():
        with contextlib.suppress(RolloutError):  # text, NaN, an array: not a metric
            numbers[str(name)] = checked_reward(value)
    return checked_reward(reward), next_state, bool(done), numbers


def _accepted(step: Step, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the signature of `step` accepts."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return options
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in options.items() if name in names}


@functools.cache
def agent_file(path: str) -> AgentFile:
    """Return this process's copy of the file; it is read and compiled at the first call. Raises DomainError."""
    return AgentFile(path)


class AgentFile:
    """The compiled file `path`.

    Its folder is appended to the Python path, so that it can import its neighbors.

    Raises:
        DomainError: there is no such file, or it is not Python.
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
            code = importlib.abc.InspectLoader.source_to_code(source, path)
        except (SyntaxError, ValueError) as error:
            raise DomainError(
                f"{AGENT_KEY}: {_place(error, path)} cannot be compiled: {type(error).__name__}: {error}. Fix the file."
            ) from error
        self._loader = _CompiledLoader(code, source)
        self._free_names: list[str] = []
        self._num_names = 0
        self._uncollected_s = 0.0
        self._slow_runs = 0
        # Plain functions that run in a thread now, by id of the function.
        self._running: dict[int, Future[Any]] = {}
        self._warned_of_abandoned = False
        folder = str(file.absolute().parent)
        if folder not in sys.path:
            sys.path.append(folder)

    @contextlib.contextmanager
    def episode(self) -> Iterator[Step]:
        """Run the file in a new module and yield its `step`.

        During the episode the module is in `sys.modules` (dataclasses and type hints look there) under a name that no
        other running episode has. Names are reused, so that what is kept by name, such as a logger, stays bounded.

        Raises:
            DomainError: the file has no `step` with three arguments.
            BaseException: whatever running the file raised.
        """
        if self._free_names:
            name = self._free_names.pop()
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
            else:  # the rollout was cancelled, but its step still runs in a thread and needs its module
                running.add_done_callback(lambda _: self._free(name))

    async def call(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        """Call `step`. A plain function runs in a thread, so that it may block; a coroutine runs on the event loop."""
        if inspect.iscoroutinefunction(step):
            return await step(*args, **kwargs)
        running = start_thread(functools.partial(contextvars.copy_context().run, step, *args, **kwargs))
        self._running[id(step)] = running
        # Added before anything awaits the future: the next call of this step makes its own entry.
        running.add_done_callback(lambda _: self._running.pop(id(step), None))
        try:
            answer = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.running() and not self._warned_of_abandoned:
                self._warned_of_abandoned = True
                logger.warning(
                    "%s: a rollout ended while %s was running; its thread continues until the function returns. Give "
                    "whatever it waits for a time-out shorter than actor.rollout_timeout_s.",
                    AGENT_KEY, self.where(step),
                )  # fmt: skip
            raise
        return await answer if inspect.isawaitable(answer) else answer

    def check(self) -> None:
        """Run the file once and look for `step`.

        Raises:
            DomainError: running it failed, or it has no `step` with three arguments.
        """
        try:
            with self.episode():
                pass
        except DomainError:
            raise
        except Exception as error:
            raise DomainError(
                f"{AGENT_KEY}: running {_place(error, self.path)} failed: {type(error).__name__}: {error}. Fix the "
                "file (are its imports installed?)."
            ) from error

    def where(self, step: Step) -> str:
        """Return `step of FILE:LINE`, for messages."""
        code = getattr(inspect.unwrap(step), "__code__", None)
        line = f":{code.co_firstlineno}" if code is not None and code.co_filename == self.path else ""
        return f"step of {self.path}{line}"

    def _free(self, name: str) -> None:
        sys.modules.pop(name, None)
        self._free_names.append(name)

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
                "%s: running %s takes %.1f s, and every rollout runs it. Move the slow part into a module that it "
                "imports; a module runs once.", AGENT_KEY, self.path, seconds,
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


class _CompiledLoader(importlib.abc.InspectLoader):
    """Runs the same code in every module that it loads."""

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
    """Return `path:line` of the offending line in the user's file, or `path`."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path
