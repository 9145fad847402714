"""Inside a rollout worker: runs the user's rollouts, many at once on one event loop, and answers the actor.

Called by `worker_main`; waits for the actor's messages and, inside rollouts, for the servers. A worker
is a process of its own, so that user code that blocks or dies holds up its own rollouts only.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from pipelinerl.actor.worker_messages import (
    CancelRollout,
    Connection,
    Fatal,
    FromWorker,
    Ready,
    RolloutEnded,
    RolloutFailed,
    Servers,
    StartRollout,
    ToWorker,
    sendable,
)
from pipelinerl.domains.registry import RolloutFunction
from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError, UserError, WorkerError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.llm.sample_builder import (
    build_samples,
    check_result,
    complete_texts,
    encodable,
    recorded_samples,
    safe_text,
    summarize,
    version_range,
)
from pipelinerl.records import EvaluationSample
from pipelinerl.rollouts import RolloutResult

logger = logging.getLogger(__name__)

_TRACEBACKS_PER_KIND = 3


class RolloutWorker:
    """Runs rollouts for the actor at the other end of `reader` and `writer`.

    Args:
        function: the user's rollout function.
        cfg: what the function gets as configuration.
        training_llms: one handle per server, for training rollouts.
        evaluation_llms: the same servers with the parameters of evaluations.
        incarnation: goes into samples.
        block_limit_s: if user code holds the event loop for longer, the process says where and ends.
        make_llms: handles (training, evaluation) of a server that joined in mid run, from its URL.
    """

    def __init__(
        self,
        function: RolloutFunction,
        cfg: Any,
        training_llms: Sequence[TrainableLLM],
        evaluation_llms: Sequence[TrainableLLM],
        incarnation: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        block_limit_s: float,
        make_llms: Callable[[str], tuple[TrainableLLM, TrainableLLM]] | None = None,
    ) -> None:
        self._function = function
        self._cfg = cfg
        self._llms = {False: list(training_llms), True: list(evaluation_llms)}
        self._temperature = float(training_llms[0].parameters.get("temperature", 1.0)) if training_llms else None
        self._incarnation = incarnation
        self._actor: Connection[ToWorker] = Connection(reader, writer, ToWorker)
        self._block_limit_s = block_limit_s
        self._make_llms = make_llms
        self._running: dict[int, asyncio.Task[None]] = {}
        self._seen: Counter[str] = Counter()

    async def run(self) -> None:
        """Serve until the actor closes the connection, then cancel what still runs.

        Raises:
            BaseException: whatever went wrong in this class (a rollout's own errors are answers, not errors).
        """
        async with open_session() as session:
            self._send(Ready(pid=os.getpid()))
            try:
                async with asyncio.TaskGroup() as rollouts, _watched_loop(self._block_limit_s):
                    while (message := await self._actor.receive()) is not None:
                        self._take(message, rollouts, session)
                    for task in self._running.values():
                        task.cancel()
            finally:
                self._actor.close()

    def _take(self, message: ToWorker, rollouts: asyncio.TaskGroup, session: aiohttp.ClientSession) -> None:
        match message:
            case Servers():
                self._add_servers(message.urls)
                for llms in self._llms.values():
                    for llm, max_model_len in zip(llms, message.max_model_lens, strict=True):
                        llm.max_model_len = max_model_len
            case StartRollout():
                task = rollouts.create_task(self._run_rollout(message, session))
                self._running[message.ticket] = task
                task.add_done_callback(functools.partial(self._forget, message.ticket))
            case CancelRollout():
                if message.ticket in self._running:
                    self._running[message.ticket].cancel()
                else:
                    self._send(RolloutFailed(message.ticket, "cancelled", ""))

    def _add_servers(self, urls: Sequence[str]) -> None:
        """Make handles of the servers that are new in `urls`."""
        for url in urls[len(self._llms[False]) :]:
            if self._make_llms is None:
                raise WorkerError(f"a server joined ({url}), and this worker cannot make a handle of it")
            for llms, llm in zip((self._llms[False], self._llms[True]), self._make_llms(url), strict=True):
                if llms:
                    llm.share_renderer(llms[0])
                llms.append(llm)

    def _forget(self, ticket: int, task: asyncio.Task[None]) -> None:
        del self._running[ticket]
        if task.cancelled():
            self._send(RolloutFailed(ticket, "cancelled", ""))

    async def _run_rollout(self, start: StartRollout, session: aiohttp.ClientSession) -> None:
        llm = self._llms[start.evaluation][start.server].for_rollout(start.seed)
        answer: FromWorker
        try:
            result = await self._function(self._cfg, llm, start.problem, session)
            answer = sendable(self._ended(start, llm, result))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; each kind has its answer
            answer = self._failed(start, llm, error)
        if llm.counters.fatal is not None:
            answer = Fatal(user_error=False, message=llm.counters.fatal)
        self._send(answer)

    def _ended(self, start: StartRollout, llm: TrainableLLM, result: Any) -> RolloutEnded:
        result = check_result(result, self._function)
        if not start.evaluation and not result.training_texts:
            raise RolloutError("no_samples", "the rollout returned no training text")
        samples = []
        if not start.evaluation:
            complete_texts(result, llm)
            samples = build_samples(
                result.training_texts,
                group_id=start.group_id,
                rollout_id=start.rollout_id,
                incarnation=self._incarnation,
                temperature=self._temperature,
            )
        versions = version_range(result.training_texts, llm.counters.versions)
        return RolloutEnded(
            ticket=start.ticket,
            samples=samples,
            summary=summarize(result, start.rollout_id),
            dataset_name=result.dataset_name,
            min_version=versions[0] if versions else None,
            max_version=versions[1] if versions else None,
            requests=llm.counters.requests,
            retries=llm.counters.retries,
            recorded=self._recorded(start, result) if start.record else [],
        )

    def _recorded(self, start: StartRollout, result: RolloutResult) -> list[EvaluationSample]:
        """What an evaluation's rollout said. A text that cannot be recorded never costs the rollout."""
        try:
            return recorded_samples(
                result.training_texts,
                group_id=start.group_id,
                rollout_id=start.rollout_id,
                incarnation=self._incarnation,
                reward=result.metrics.reward,
            )
        except Exception as error:  # noqa: BLE001 - texts that are not trained may hold anything
            logger.warning("what rollout %s said is not recorded: %r", start.rollout_id, error)
            return []

    def _failed(self, start: StartRollout, llm: TrainableLLM, error: BaseException) -> RolloutFailed | Fatal:
        if isinstance(error, UserError):
            return Fatal(user_error=True, message=safe_text(error))
        if isinstance(error, EndRunError):
            return Fatal(user_error=False, message=safe_text(error))
        if isinstance(error, RolloutError):
            reason, message = safe_text(error.reason), safe_text(error)
        else:
            reason = encodable(f"exception_{type(error).__name__}")
            message = encodable("".join(traceback.format_exception(error)))
            self._seen[reason] += 1
            if self._seen[reason] <= _TRACEBACKS_PER_KIND:
                logger.warning("rollout %s failed:\n%s", start.rollout_id, message)
        return RolloutFailed(
            ticket=start.ticket,
            reason=reason,
            message=message,
            transient=isinstance(error, RetryableRolloutError),
            requests=llm.counters.requests,
            retries=llm.counters.retries,
        )

    def _send(self, message: FromWorker) -> None:
        self._actor.send(message)


@contextlib.asynccontextmanager
async def _watched_loop(limit_s: float) -> AsyncIterator[None]:
    """End the process, with a traceback on stderr, when its event loop stands still for `limit_s`.

    The watch is a thread in C: it also works while a regular expression or another extension holds the interpreter.
    """

    async def rearm() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.stderr)
            await asyncio.sleep(limit_s / 10)

    watch = asyncio.create_task(rearm())
    try:
        yield
    finally:
        watch.cancel()
        faulthandler.cancel_dump_traceback_later()
