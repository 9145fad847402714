"""Plays episodes of a user's agent function: `step(state, action, label, **kwargs)` in a file of the user.

`generate_agent_rollout` is the rollout function of a run with `actor.agent_func_path`. Waits for the server and for the
user's function. State and action are text; the ids behind them are the server's as long as a state only grows.
"""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pipelinerl.agents.agent_file import AGENT_KEY, AgentFile, Step, agent_file
from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.llm.sample_builder import checked_reward
from pipelinerl.llm.trainable import generate
from pipelinerl.llm.transcript import Transcript, continue_ids, without_sampled_stop
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

_RESERVED = frozenset(("reward", "success", "no_error", "no_answer", "num_steps", "context_full"))


@dataclass(slots=True)
class _Played:
    """What an episode came to. `context_full`: it ended because no room was left for another action."""

    transcripts: list[Transcript]
    rewards: list[float] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    context_full: bool = False

    def training_texts(self, reward: float) -> list[TrainingText]:
        texts = [transcript.training_text(reward) for transcript in self.transcripts if transcript.turns]
        if self.context_full:
            # As with an answer at its length limit: `overlong_filtering` may leave it out.
            texts[-1].finished, texts[-1].finish_reason = False, "length"
        return texts


async def generate_agent_rollout(
    cfg: Any, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Play one episode: sample an action, call `step`, go on with its next state until it is done.

    The file is run anew for each episode, so its globals are the episode's own. `problem` has `state` (the prompt text)
    and `label`. Ids are kept where the next state begins with state + action; otherwise a new sample starts. Every
    sample of the rollout gets its reward (`agent.reward`). An episode that fills the context ends there.

    Raises:
        DomainError: the function returned something of another shape.
        RolloutError: the prompt fills the context, or a reward is no finite number (`bad_reward`).
    """
    started = time.monotonic()
    file = agent_file(str(cfg.actor.agent_func_path))
    with file.episode() as step:
        played = await _play(file, step, cfg, llm, problem, session)
    total = played.rewards[-1] if cfg.agent.reward == "last" else math.fsum(played.rewards)
    success = bool(played.extra.pop("success", total > 0))
    named = {f"extra_{name}" if name in _RESERVED else name: value for name, value in played.extra.items()}
    own = {"num_steps": len(played.rewards), "context_full": played.context_full}
    return RolloutResult(
        training_texts=played.training_texts(total),
        metrics=BaseMetrics.model_validate({"reward": total, "success": success, **own, **named}),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )


async def _play(
    file: AgentFile,
    step: Step,
    cfg: Any,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
) -> _Played:
    options = _accepted(step, {"sampling_params": dict(llm.parameters)})
    renderer = llm.renderer
    state, label = str(problem["state"]), problem.get("label")
    ids = renderer.encode(state)
    played = _Played([Transcript(llm.temperature)])
    for _ in range(cfg.agent.max_steps):
        try:
            call = await generate(llm, Prompt(token_ids=ids), state, ids, session)
        except RolloutError as error:
            if error.reason != "context_overflow" or not played.rewards:
                raise
            played.context_full = True
            break
        if cfg.agent.action_special_tokens:
            call.output_text = renderer.decode(call.output_token_ids, skip_special_tokens=False)
        action = call.output_text
        played.transcripts[-1].add(call, state + action)
        answer = await file.call(step, state, action, label, **options)
        reward, next_state, done, more = read_step(answer, file.where(step))
        played.rewards.append(reward)
        played.extra.update(more)
        if done:
            break
        if next_state.startswith(state + action):
            rest = next_state[len(state) + len(action) :]
            if cfg.agent.action_special_tokens:  # the action is all that was sampled
                more_ids = renderer.encode_after(action, rest)
            else:
                rest = without_sampled_stop(renderer, call, llm.parameters.get("stop"), rest)
                more_ids = continue_ids(renderer, call, action, rest)
            ids = [*played.transcripts[-1].ids, *more_ids]
        else:
            played.transcripts.append(Transcript(llm.temperature))
            ids = renderer.encode(next_state)
        state = next_state
    return played


def check_config(config: RunConfig) -> None:
    """Check before a run that the file can be run and has a `step`. Raises DomainError."""
    agent_file(str(config.actor.agent_func_path)).check()


# The registry calls this when it looks the rollout function up.
generate_agent_rollout.check_config = check_config  # type: ignore[attr-defined]


def read_step(answer: Any, where: str) -> tuple[float, str, bool, dict[str, float]]:
    """Read what `step` returned; `extra_info` may be missing, and only its numbers are kept.

    Args:
        answer: what it returned.
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
