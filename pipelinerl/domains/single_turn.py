"""One question, one answer, one grade: the rollout that most built-in domains are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.task import RewardsConfig
from pipelinerl.domains.rewards import JudgedAnswer, compute_reward
from pipelinerl.domains.user_task import RolloutFunction
from pipelinerl.grading import verify
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.llm.client import llm_async_generate, make_training_text
from pipelinerl.records.completion import is_finished
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText
from pipelinerl.sandbox.protocol import OVER_LIMIT, Grade, GraderFunction


def single_turn(
    grader: GraderFunction, task: Callable[[dict[str, Any]], str], system_prompt: str | None = None
) -> RolloutFunction:
    """Return the rollout function of a domain that asks `task(problem)` and grades the answer (see `answer_once`)."""

    async def generate_rollout(
        cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
    ) -> RolloutResult:
        return await answer_once(cfg, llm, problem, session, grader, task=task(problem), system_prompt=system_prompt)

    return generate_rollout


async def answer_once(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
    grader: GraderFunction | str,
    *,
    task: str,
    system_prompt: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    timeout_s: float | None = None,
    **params: Any,
) -> RolloutResult:
    """Ask `task`, grade the answer with `grader(text, problem, **params)` and return the trainable result.

    Args:
        system_prompt: words of the domain; `actor.system_prompt` wins. `actor.task_template`, if set, is put around
            the task in place of `{task}`, and around those of `actor.examples`, which come before it.
        timeout_s: processor time for the grader, if it is not `verifier.timeout_s`.
    """
    started = time.monotonic()
    call = await llm_async_generate(llm, Prompt(messages=chat(cfg, task, system_prompt), tools=tools), session)
    grade = await verify(grader, call.graded_text, problem, timeout_s=timeout_s, **params)
    return graded_result(cfg, llm, problem, [call], [make_training_text(llm, call)], grade, started)


def chat(cfg: DictConfig, task: str, system_prompt: str | None = None) -> list[dict[str, str]]:
    """Return the messages of one question, in the configuration's words where it has some."""
    system = cfg.actor.system_prompt if cfg.actor.system_prompt is not None else system_prompt
    template = cfg.actor.task_template or "{task}"
    messages = [{"role": "system", "content": system}] if system else []
    for example in cfg.actor.examples:
        messages.append({"role": "user", "content": template.replace("{task}", example.task)})
        messages.append({"role": "assistant", "content": example.answer})
    return [*messages, {"role": "user", "content": template.replace("{task}", task)}]


def graded_result(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    calls: Sequence[LLMCall],
    texts: list[TrainingText],
    grade: Grade,
    started: float,
) -> RolloutResult:
    """Return the result of a graded answer: reward by `rewards`, its parts among the metrics.

    Args:
        calls: all turns; the answer is as long as they are together, and ends as the last one does.
        texts: that are trained with the reward.
        started: when the rollout began, by `time.monotonic`.
    """
    difficulty, output_tokens = problem.get("difficulty"), sum(len(call.output_token_ids) for call in calls)
    answer = JudgedAnswer(
        grade=grade,
        finished=is_finished(calls[-1].finish_reason),
        output_tokens=output_tokens,
        max_tokens=int(llm.parameters.get("max_tokens", output_tokens)),
        difficulty=float(difficulty) if isinstance(difficulty, int | float) else None,
    )
    rewards = RewardsConfig.model_validate(OmegaConf.to_container(cfg.rewards))
    reward, parts = compute_reward(answer, rewards, cfg.actor.discount_factor)
    for text in texts:
        text.reward = reward
    metrics = BaseMetrics(
        reward=reward,
        success=grade.status == "correct",
        no_error=grade.status != "unparsable",
        no_answer=grade.status == "no_answer",
        **{"score": grade.score, "overflow": float(not answer.finished), OVER_LIMIT: 0.0, **parts, **grade.details},
    )
    return RolloutResult(
        training_texts=texts,
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
