"""One rollout against a server that answers what it is told: shows that a rollout function works, without a model.

Called by `check-domain`. Waits for the rollout, at most `actor.rollout_timeout_s` and `TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from pipelinerl.commands.time_limit import time_limit
from pipelinerl.config import RunConfig
from pipelinerl.domains.check import domain_function
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.domains.registry import load_rollout_function
from pipelinerl.errors import DomainError, UserError

TIMEOUT_S = 120.0
_BLOCK_GRACE_S = 2.0
_FILLER = "I do not know."
_TOKEN = "dry-rollout"


def dry_rollout(config: RunConfig, problem: Problem) -> str:
    """Run one rollout of `problem` and return one line about it.

    The server answers with the domain's gold answer, if it has one: the rollout must then be a success.

    Raises:
        DomainError: the rollout fails, does not end, has nothing to train on, or does not succeed with the gold answer.
    """
    limit_s = min(TIMEOUT_S, config.actor.rollout_timeout_s)
    # A function that waits is ended by the event loop; the grace is for one that holds the loop.
    with time_limit(
        limit_s + _BLOCK_GRACE_S,
        f"actor.rollout_policy: a dry rollout of problem {problem.id!r} holds the event loop and",
        "Other rollouts cannot run meanwhile: await what takes long, or put it into a thread or a @grader.",
    ):
        return asyncio.run(_run(config, problem, limit_s))


async def _run(config: RunConfig, problem: Problem, limit_s: float) -> str:
    from pipelinerl.config.load import to_dictconfig
    from pipelinerl.grading import open_verifier
    from pipelinerl.llm.client import open_session
    from pipelinerl.llm.sample_builder import build_samples, check_result, complete_texts, summarize
    from pipelinerl.tiny.tokenizer import build_tokenizer

    function = load_rollout_function(config)
    gold_answer = domain_function(config, "gold_answer")
    gold = gold_answer(problem.data) if gold_answer is not None else None
    tokenizer = build_tokenizer(max_number=1)
    async with (
        _scripted_server(tokenizer.encode(gold or _FILLER, add_special_tokens=False)) as url,
        open_session() as session,
        open_verifier(config.verifier, []),
    ):
        llm = _handle(config, url, tokenizer)
        timeout = asyncio.timeout(limit_s)
        try:
            async with timeout:
                answer = await function(to_dictconfig(config), llm, problem.data, session)
            result = check_result(answer, function)
            if not result.training_texts:
                raise DomainError(
                    f"actor.rollout_policy: a dry rollout of problem {problem.id!r} returned no training text, so "
                    "nothing could be trained: the actor fails such rollouts (no_samples). Return "
                    "training_texts=[make_training_text(llm, llm_call), ...], for wrong answers too."
                )
            complete_texts(result, llm)
            samples = build_samples(result.training_texts, group_id="dry", rollout_id="dry/r0")
            summary = summarize(result, "dry/r0")
        except UserError:
            raise
        except Exception as error:
            if timeout.expired():
                raise DomainError(
                    f"actor.rollout_policy: a dry rollout of problem {problem.id!r} did not end within {limit_s:g} s "
                    "(actor.rollout_timeout_s; at most 120 here), although every request was answered at once. It "
                    f"waits for something else{_place_of(error)}."
                ) from error
            raise DomainError(
                f"actor.rollout_policy: a dry rollout of problem {problem.id!r} failed: {type(error).__name__}: {error}"
            ) from error
    said = "the gold answer" if gold else f"{_FILLER!r}"
    if gold and not summary.success:
        raise DomainError(
            f"actor.rollout_policy: answered with the gold answer, the dry rollout of problem {problem.id!r} is no "
            f"success (reward {summary.reward}, {summary.metrics}). Prompt, grader and gold answer do not agree."
        )
    return (
        f"a dry rollout, answered with {said}: reward {summary.reward:g}, success {summary.success}, "
        f"{len(samples)} sample(s), metrics {summary.metrics}"
    )


def _place_of(error: BaseException) -> str:
    """Where the user's function was when it was cancelled, as ` at file:line`."""
    cause = error.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    # The first frame is this file's, the second the rollout function's.
    return f" at {frames[1].filename}:{frames[1].lineno}" if len(frames) > 1 else ""


def _handle(config: RunConfig, url: str, tokenizer: Any) -> Any:
    from pipelinerl.llm import TrainableLLM
    from pipelinerl.llm.trainable import sampling_parameters

    parameters = sampling_parameters(config.llm.parameters)
    return TrainableLLM(url, "actor", tokenizer, parameters=parameters, token=_TOKEN).for_rollout(seed=0)


@contextlib.asynccontextmanager
async def _scripted_server(token_ids: list[int]) -> AsyncIterator[str]:
    """Serve `/inference/v1/generate`, answering `token_ids` to everything."""

    async def generate(request: web.Request) -> web.Response:
        content = [{"token_id": token, "logprob": -0.5} for token in token_ids]
        choice = {
            "token_ids": token_ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": [{"version": "0", "start": 0, "end": len(token_ids)}],
        }
        return web.json_response({"choices": [choice]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
