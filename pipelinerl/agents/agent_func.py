"""Runs a user's agent function: `async step(state, action, label, **kwargs) -> (reward, next_state, done, extra_info)`.

`generate_agent_rollout` is the rollout function of a run with `actor.agent_func_path`. Waits for the server and for the
user's function. State and action are text; the ids behind them are the server's as long as a state only grows.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.llm.continuation import continue_ids
from pipelinerl.llm.generate import answer_of
from pipelinerl.llm.sample_builder import checked_reward
from pipelinerl.llm.transcript import Transcript
from pipelinerl.rollouts import BaseMetrics, RolloutResult

AGENT_KEY = "actor.agent_func_path"
_SHAPE = "async def step(state, action, label, **kwargs) -> (reward, next_state, done, extra_info)"
_RESERVED = frozenset(("reward", "success", "no_error", "no_answer", "num_steps"))

Step = Callable[..., Any]


async def generate_agent_rollout(
    cfg: Any, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Play one episode: sample an action, call `step`, go on with its next state until it is done.

    `problem` has `state` (the prompt text) and `label`. Ids are kept where the next state begins with state + action;
    otherwise a new sample starts. Every sample of the rollout gets its reward (`agent.reward`).

    Raises:
        DomainError: the function returned something of another shape.
        RolloutError: the rollout cannot go on (context full), or a reward is no finite number (`bad_reward`).
    """
    started = time.monotonic()
    path = str(cfg.actor.agent_func_path)
    step = load_step(path)
    options = _accepted(step, {"sampling_params": dict(llm.parameters)})
    renderer = llm.renderer
    state, label = str(problem["state"]), problem.get("label")
    ids = renderer.encode(state)
    temperature = float(llm.parameters.get("temperature", 1.0))
    transcripts = [Transcript(temperature)]
    rewards: list[float] = []
    extra: dict[str, float] = {}
    for _ in range(cfg.agent.max_steps):
        call = await answer_of(llm, Prompt(token_ids=ids), state, ids, session)
        action = call.output_text
        transcripts[-1].add(call, state + action)
        answer = step(state, action, label, **options)
        reward, next_state, done, more = read_step(await answer if inspect.isawaitable(answer) else answer, path)
        rewards.append(reward)
        extra.update(more)
        if done:
            break
        if next_state.startswith(state + action):
            rest = next_state[len(state) + len(action) :]
            ids = [*transcripts[-1].ids, *continue_ids(renderer, call, action, rest)]
        else:
            transcripts.append(Transcript(temperature))
            ids = renderer.encode(next_state)
        state = next_state
    total = rewards[-1] if cfg.agent.reward == "last" else math.fsum(rewards)
    success = bool(extra.pop("success", total > 0))
    named = {f"extra_{name}" if name in _RESERVED else name: value for name, value in extra.items()}
    return RolloutResult(
        training_texts=[transcript.training_text(total) for transcript in transcripts if transcript.turns],
        metrics=BaseMetrics.model_validate({"reward": total, "success": success, "num_steps": len(rewards), **named}),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )


def check_config(config: RunConfig) -> None:
    """Check before a run that the file can be loaded and has a `step`. Raises DomainError."""
    load_step(str(config.actor.agent_func_path))


# The registry calls this when it looks the rollout function up.
generate_agent_rollout.check_config = check_config  # type: ignore[attr-defined]


def load_step(path: str) -> Step:
    """Return `step` of the file `path`; the file is run once in each process, so its globals live as long as that.

    Raises:
        DomainError: no such file, it cannot be run, or has no function `step` of three arguments.
    """
    file = Path(path)
    name = f"pipelinerl_agent_func_{file.stem}_{abs(hash(str(file.absolute()))):x}"
    module = sys.modules.get(name)
    if module is None:
        if not file.is_file():
            raise DomainError(
                f"{AGENT_KEY}: got {path!r}, expected a Python file with {_SHAPE}. There is no such file."
            )
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise DomainError(f"{AGENT_KEY}: got {path!r}, expected a Python file (.py) with {_SHAPE}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise DomainError(
                f"{AGENT_KEY}: running {path} failed: {type(error).__name__}: {error}. Mend the file (are its imports "
                "complete?)."
            ) from error
    step = getattr(module, "step", None)
    if not callable(step):
        raise DomainError(f"{AGENT_KEY}: {path} has no function step, expected {_SHAPE}.")
    try:
        inspect.signature(step).bind_partial("", "", None)
    except TypeError as error:
        raise DomainError(f"{AGENT_KEY}: step of {path}: {error}; expected {_SHAPE}. Change its parameters.") from error
    return step  # type: ignore[no-any-return]


def read_step(answer: Any, path: str) -> tuple[float, str, bool, dict[str, float]]:
    """Read what `step` returned; `extra_info` may be missing, and only its numbers are kept.

    Raises:
        DomainError: it has another shape.
        RolloutError: `bad_reward`.
    """
    if not isinstance(answer, tuple | list) or len(answer) not in (3, 4):
        raise DomainError(f"{AGENT_KEY}: step of {path} returned {str(answer)[:80]!r}, expected (reward, next_state, "
                          "done, extra_info).")  # fmt: skip
    reward, next_state, done = answer[:3]
    extra = answer[3] if len(answer) == 4 else {}
    if not isinstance(next_state, str):
        raise DomainError(
            f"{AGENT_KEY}: step of {path} returned a next_state of type {type(next_state).__name__}, expected text."
        )
    numbers = {}
    for name, value in (extra if isinstance(extra, dict) else {}).items():
        number = _number(value)
        if number is not None:
            numbers[str(name)] = number
    return checked_reward(reward), next_state, bool(done), numbers


def _number(value: Any) -> float | None:
    """Return a finite number of any kind (tensors of one element included), or None."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _accepted(step: Step, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the signature of `step` takes."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return options
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in options.items() if name in names}
