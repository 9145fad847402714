"""Makes a rollout function of an agent that talks to an OpenAI endpoint and knows nothing of training.

`black_box` is called in user code: `generate_rollout = black_box(rollout)`, named by `actor.rollout_policy`. A rollout
waits for the agent; a plain function runs in a thread, so that it may block.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from pipelinerl.agents.proxy import Proxy
from pipelinerl.agents.recording import Recording
from pipelinerl.agents.threads import start_thread
from pipelinerl.errors import DomainError, EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.sample_builder import checked_reward
from pipelinerl.rollouts import BaseMetrics, RolloutResult

_SHAPE = "rollout(base_url, api_key, problem) -> reward, or (reward, dict of metrics)"

Agent = Callable[[str, str, dict[str, Any]], Any]


class BlackBox:
    """The rollout function. It owns the proxy of its process, started at the first rollout."""

    def __init__(self, agent: Agent) -> None:
        functools.update_wrapper(self, agent)
        # Checks of the signature are about this object, not about the agent.
        self.__signature__ = inspect.signature(self.__call__)  # type: ignore[operator]
        self._agent = agent
        self._proxy: Proxy | None = None
        self._starting = asyncio.Lock()

    async def __call__(
        self, cfg: Any, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
    ) -> RolloutResult:
        """Run the agent once and return the samples of everything it asked.

        Raises:
            RolloutError: a request could not be served, the agent asked nothing (`no_request`), or its reward is no
                number (`bad_reward`). The agent's own exceptions pass through.
        """
        started = time.monotonic()
        proxy = await self._started_proxy()
        with proxy.recording(llm, session) as recording:
            try:
                answer = await self._run(proxy.base_url, recording.key, problem)
            except Exception as error:
                raise _cause(recording, error) from error
        if isinstance(recording.failure, EndRunError | RetryableRolloutError):
            raise recording.failure
        reward, metrics = _read(answer)
        if not recording.num_calls:
            raise recording.failure or RolloutError("no_request", "the agent ended without a request to base_url")
        success = bool(metrics.pop("success", reward > 0))
        return RolloutResult(
            training_texts=recording.training_texts(reward),
            metrics=BaseMetrics.model_validate(
                {"requests": recording.num_calls, **metrics, "reward": reward, "success": success}
            ),
            latency=time.monotonic() - started,
            dataset_name=problem.get("dataset"),
        )

    async def close(self) -> None:
        """Stop the proxy; the end of the process does the same."""
        if self._proxy is not None:
            await self._proxy.close()
            self._proxy = None

    async def _started_proxy(self) -> Proxy:
        async with self._starting:
            if self._proxy is None:
                proxy = Proxy()
                await proxy.start()
                self._proxy = proxy
            return self._proxy

    async def _run(self, base_url: str, key: str, problem: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(base_url, key, problem)
        answer = await asyncio.wrap_future(start_thread(functools.partial(self._agent, base_url, key, problem)))
        return await answer if inspect.isawaitable(answer) else answer


def black_box(agent: Agent) -> BlackBox:
    """Return a rollout function for `agent`: `rollout(base_url, api_key, problem) -> reward`, async or not.

    The agent gives `base_url` and `api_key` to its OpenAI client. It may ask as often as it likes, also at once. It may
    return `(reward, metrics)`, where `metrics` is a dict of numbers.
    """
    return BlackBox(agent)


def _cause(recording: Recording, error: Exception) -> Exception:
    """Return why the agent failed: the failed request behind its exception, if there was one."""
    return recording.failure if recording.failure is not None else error


def _read(answer: Any) -> tuple[float, dict[str, Any]]:
    metrics: Any = {}
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], dict):
            raise DomainError(f"actor.rollout_policy: the agent returned {str(answer)[:80]!r}, expected {_SHAPE}.")
        answer, metrics = answer
    if answer is None:
        raise DomainError(f"actor.rollout_policy: the agent returned None, expected {_SHAPE}. Is a `return` missing?")
    return checked_reward(answer), dict(metrics)
