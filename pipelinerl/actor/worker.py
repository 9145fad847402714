"""`python -m pipelinerl.actor.worker ...`: one rollout worker, started by the actor.

It imports the user's rollout function, loads the tokenizer, and runs many rollouts at once on one event loop until the
actor closes the inherited socket. A worker is a process of its own, so that user code that blocks or dies affects only
its rollouts. It waits for messages of the actor and, inside rollouts, for the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import functools
import logging
import os
import socket
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from pipelinerl.actor.worker_messages import (
    CRASHED_EXIT_CODE,
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
    check_sendable,
    rest_collector,
)
from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config, to_dictconfig
from pipelinerl.domains.user_task import RolloutFunction, describe_error, load_rollout_function, place_of, where_is
from pipelinerl.errors import (
    EXIT_USER_ERROR,
    DomainError,
    EndRunError,
    RetryableRolloutError,
    RolloutError,
    UserError,
)
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session, sampling_parameters
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
from pipelinerl.llm.tokens import ChatRenderer, load_tokenizer
from pipelinerl.records import EvaluationSample
from pipelinerl.role import LOG_FORMAT, TOKEN_KEY, end_with_launcher
from pipelinerl.rollouts import RolloutResult
from pipelinerl.rundir.layout import RunDir, read_identity
from pipelinerl.sandbox.services import open_environments, open_verifier
from pipelinerl.world import WorldMap

logger = logging.getLogger(__name__)

_MODEL_NAME = "actor"
_TRACEBACKS_PER_KIND = 3


class RolloutWorker:
    """Runs rollouts for the actor.

    Args:
        block_limit_s: if user code blocks the event loop for longer, the process prints a traceback and exits.
    """

    def __init__(
        self,
        function: RolloutFunction,
        config: RunConfig,
        tokenizer: Any,
        incarnation: int,
        actor: Connection[ToWorker],
        block_limit_s: float,
    ) -> None:
        self._function = function
        self._config = config
        self._cfg = to_dictconfig(config)
        # One for all: its cache serves every server.
        self._renderer = ChatRenderer(tokenizer, config.llm.chat_template_kwargs)
        self._temperature = config.llm.parameters.temperature
        self._incarnation = incarnation
        self._actor = actor
        self._block_limit_s = block_limit_s
        # Handles of the servers: for training (None), and for each set of evaluations.
        kinds: list[int | None] = [None, *range(len(config.evaluation_parameters))]
        self._llms: dict[int | None, list[TrainableLLM]] = {kind: [] for kind in kinds}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._seen: Counter[str] = Counter()

    async def run(self) -> None:
        """Serve until the actor closes the connection, then cancel what is running.

        Raises:
            BaseException: an error of this class. Errors of rollouts become answers.
        """
        async with open_session() as session:
            self._actor.send(Ready(pid=os.getpid()))
            try:
                async with asyncio.TaskGroup() as rollouts, _watched_loop(self._block_limit_s):
                    while (message := await self._actor.receive()) is not None:
                        self._handle(message, rollouts, session)
                    for task in self._running.values():
                        task.cancel()
            finally:
                self._actor.close()

    def _handle(self, message: ToWorker, rollouts: asyncio.TaskGroup, session: aiohttp.ClientSession) -> None:
        match message:
            case Servers():
                self._set_servers(message)
            case StartRollout():
                task = rollouts.create_task(self._run_rollout(message, session))
                self._running[message.ticket] = task
                task.add_done_callback(functools.partial(self._forget, message.ticket))
            case CancelRollout():
                if message.ticket in self._running:
                    self._running[message.ticket].cancel()
                else:
                    self._actor.send(RolloutFailed(message.ticket, "cancelled", ""))

    def _set_servers(self, servers: Servers) -> None:
        for evaluation_set, llms in self._llms.items():
            for url in servers.urls[len(llms) :]:
                llms.append(make_llm(self._config, url, self._renderer, evaluation_set))
                llms[-1].max_model_len = servers.max_model_len

    def _forget(self, ticket: int, task: asyncio.Task[None]) -> None:
        del self._running[ticket]
        if task.cancelled():
            self._actor.send(RolloutFailed(ticket, "cancelled", ""))

    async def _run_rollout(self, start: StartRollout, session: aiohttp.ClientSession) -> None:
        llm = self._llms[start.evaluation_set if start.evaluation else None][start.server].for_rollout(start.seed)
        answer: FromWorker
        try:
            result = await self._function(self._cfg, llm, start.problem, session)
            answer = self._ended(start, llm, result)
            check_sendable(answer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; each kind has its answer
            answer = self._failed(start, llm, error)
        if llm.counters.fatal is not None:
            answer = Fatal(user_error=False, message=llm.counters.fatal)
        self._actor.send(answer)

    def _ended(self, start: StartRollout, llm: TrainableLLM, result: Any) -> RolloutEnded:
        result = check_result(result, self._function)
        if not start.evaluation and not result.training_texts:
            raise RolloutError("no_samples", "the rollout returned no training text")
        samples = []
        if not start.evaluation:
            complete_texts(result, llm.temperature, llm.counters.versions)
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
        """The samples of an evaluation's rollout. A text that cannot be recorded never costs the rollout."""
        try:
            samples = recorded_samples(
                result.training_texts,
                group_id=start.group_id,
                rollout_id=start.rollout_id,
                incarnation=self._incarnation,
                reward=result.metrics.reward,
            )
            return msgspec.json.decode(msgspec.json.encode(samples), type=list[EvaluationSample])
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
            if not place_of(error):  # what the function returned is at fault
                message += where_is(self._function)
        else:
            reason = encodable(f"exception_{type(error).__name__}")
            message = encodable(describe_error(error))
            self._seen[reason] += 1
            if self._seen[reason] <= _TRACEBACKS_PER_KIND:
                text = encodable("".join(traceback.format_exception(error)))
                logger.warning("rollout %s failed:\n%s", start.rollout_id, text)
        return RolloutFailed(
            ticket=start.ticket,
            reason=reason,
            message=message,
            transient=isinstance(error, RetryableRolloutError),
            requests=llm.counters.requests,
            retries=llm.counters.retries,
        )


@contextlib.asynccontextmanager
async def _watched_loop(limit_s: float) -> AsyncIterator[None]:
    """Exit with a traceback on stderr when the event loop is blocked for `limit_s`.

    The watchdog is a C thread: it also works while a regular expression or another extension holds the interpreter.
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


def make_llm(config: RunConfig, url: str, renderer: ChatRenderer, evaluation_set: int | None) -> TrainableLLM:
    """Return the handle of a server, for training (None) or a set of evaluations (`config.evaluation_parameters`).

    Evaluations request no log-probs, which would cost the server time.
    """
    is_training = evaluation_set is None
    parameters = config.llm.parameters if evaluation_set is None else config.evaluation_parameters[evaluation_set]
    return TrainableLLM(
        base_url=url,
        model_name=_MODEL_NAME,
        tokenizer=renderer.tokenizer,
        renderer=renderer,
        parameters=sampling_parameters(parameters),
        token=os.environ.get(TOKEN_KEY, ""),
        collect_logprobs=is_training,
        request_timeout_s=config.actor.request_timeout_s,
        max_retries=config.actor.max_retries,
        # Without a trainer the weights have no label.
        unlabelled_version=None if config.has_stage("finetune") else 0,
    )


async def serve(root: Path, connection: socket.socket, block_limit_s: float) -> None:
    """Run the worker of the run in folder `root` until the actor closes `connection`.

    Raises:
        DomainError: the user's rollout function cannot be used; the actor has been told.
    """
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    actor: Connection[ToWorker] = Connection(reader, writer, ToWorker)
    files = RunDir(root)
    try:
        config = load_config(files.config_file)
        function = load_rollout_function(config)
    except DomainError as error:
        actor.send(Fatal(user_error=True, message=str(error)))
        await actor.flush()
        raise
    tokenizer = load_tokenizer(config.model_path, trust_remote_code=config.finetune.trust_remote_code)
    incarnation = read_identity(files.identity_file).incarnation
    worker = RolloutWorker(function, config, tokenizer, incarnation, actor, block_limit_s)
    world = WorldMap.from_json(files.world_file.read_bytes())
    urls = {kind: [job.url for job in world.jobs_of(kind) if job.url] for kind in ("verifier", "environment")}
    token = os.environ.get(TOKEN_KEY, "")
    async with open_verifier(config.verifier, urls["verifier"], token), open_environments(urls["environment"], token):
        rest_collector()
        await worker.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the actor and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--index", required=True, type=int)
    parser.add_argument("--fd", required=True, type=int, help="inherited socket to the actor")
    parser.add_argument(
        "--block-limit-s", required=True, type=float, help="longest time user code may block the event loop"
    )
    arguments = parser.parse_args(argv)
    name = f"{arguments.job}/worker_{arguments.index}"
    logging.basicConfig(
        level=logging.INFO, format=LOG_FORMAT.replace("%(name)s", f"{name} %(name)s"), stream=sys.stderr
    )
    end_with_launcher()
    connection = socket.socket(fileno=arguments.fd)
    connection.setblocking(False)
    try:
        uvloop.run(serve(arguments.run_dir, connection, arguments.block_limit_s))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except Exception:  # noqa: BLE001 - the last stop of this process: the whole traceback goes to the log
        traceback.print_exc()
        return CRASHED_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
