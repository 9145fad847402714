"""Which servers accept rollouts: those that are up and have the weights.

The launcher says which servers are up, the trainer which of their starts have weights; both write to the stream
`pool`. When a server goes away, its rollouts run elsewhere at once. Before a server that joined gets rollouts, the
workers are told its longest sequence, for which it is asked at most `DESCRIBE_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.worker_messages import Servers
from pipelinerl.actor.workers import WorkerPool
from pipelinerl.errors import WorkerError
from pipelinerl.llm.client import open_session
from pipelinerl.records import PoolAnswer, PoolChange, ServerReady

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 300.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0
_REQUEST_TIMEOUT_S = 60.0


@dataclass(eq=False)
class _Member:
    """One server. `generation` is its newest start; `described`: the workers know `max_model_len`."""

    index: int
    name: str
    url: str
    generation: int = 0
    is_up: bool = True
    described: bool = False
    max_model_len: int | None = None
    describing: asyncio.Task[None] | None = None


class Membership:
    """The servers of a run, numbered as in `scheduler`.

    Args:
        urls: of the servers of the plan, by name. They count as up and as having weights.
        scheduler: told which servers accept rollouts.
        workers: told about servers that join.
        token: of the servers.
        incarnation: of this start; records of earlier ones are ignored.
    """

    def __init__(
        self, urls: Mapping[str, str], scheduler: Scheduler, workers: WorkerPool, token: str, incarnation: int
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._token = token
        self._incarnation = incarnation
        self._members = {name: _Member(index, name, url) for index, (name, url) in enumerate(urls.items())}
        # The newest start with weights by server; the trainer may be heard before the launcher.
        self._ready = dict.fromkeys(urls, 0)
        self._plan = list(self._members.values())
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def usable(self) -> list[str]:
        """Names of the servers that accept rollouts."""
        return [name for name, member in self._members.items() if self._scheduler.servers[member.index].usable]

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Describe the servers of the plan to the workers, and wait until these are ready.

        From now on servers that joined are asked for their description in `tasks`.

        Raises:
            WorkerError: no server answers, or a worker is not ready in time.
        """
        lengths = await fetch_max_model_lens([member.url for member in self._plan], self._token)
        for member, length in zip(self._plan, lengths, strict=True):
            member.max_model_len, member.described = length, True
        await self._workers.wait_ready(Servers(lengths, [member.url for member in self._plan]))
        self._tasks = tasks
        for member in self._members.values():
            self._refresh(member)

    def close(self) -> None:
        """Ask no server any more."""
        for member in self._members.values():
            if member.describing is not None:
                member.describing.cancel()

    def apply_change(self, change: PoolChange) -> None:
        """Apply what the launcher says about a server."""
        if change.incarnation != self._incarnation:
            return
        member = self._members.get(change.name)
        if change.event == "up":
            if member is None:
                member = _Member(self._scheduler.add_server(), change.name, change.url)
                self._members[change.name] = member
            member.generation, member.is_up = change.generation, True
        elif member is None:
            return
        else:
            member.is_up = False
        self._refresh(member)
        if change.event == "down":
            lost = self._workers.fail_rollouts_of(member.index)
            logger.warning("%s went away (%s); %d rollouts run again elsewhere", change.name, change.reason, lost)

    def apply_answer(self, answer: PoolAnswer) -> None:
        """Apply what the trainer says about a server."""
        if answer.incarnation != self._incarnation or not isinstance(answer, ServerReady):
            return
        self._ready[answer.name] = answer.generation
        if answer.name in self._members:
            self._refresh(self._members[answer.name])

    def _refresh(self, member: _Member) -> None:
        has_weights = self._has_weights(member)
        if has_weights and not member.described and member not in self._plan:
            if member.describing is None and self._tasks is not None:
                member.describing = self._tasks.create_task(self._describe(member))
        elif has_weights != self._scheduler.servers[member.index].usable:
            logger.info("%s accepts %s rollouts", member.name, "new" if has_weights else "no more")
            self._scheduler.set_usable(member.index, has_weights)

    def _has_weights(self, member: _Member) -> bool:
        return member.is_up and self._ready.get(member.name) == member.generation

    async def _describe(self, member: _Member) -> None:
        """Tell the workers about a server that joined."""
        try:
            found = await self._ask(member)
        finally:
            # At once: what is heard of the server from now on asks again.
            member.describing = None
        if not found:
            return
        member.described = True
        # Servers that joined earlier and have not answered yet are listed with an unknown length.
        known = sorted(self._members.values(), key=lambda each: each.index)
        count = 1 + max(each.index for each in known if each.described)
        self._workers.set_servers(
            Servers([each.max_model_len for each in known[:count]], [each.url for each in known[:count]])
        )
        self._refresh(member)

    async def _ask(self, member: _Member) -> bool:
        """Ask a server for its longest sequence; False if it went away meanwhile, or did not answer in time."""
        deadline, pause_s = time.monotonic() + DESCRIBE_TIMEOUT_S, FIRST_PAUSE_S
        while self._has_weights(member):
            try:
                (member.max_model_len,) = await fetch_max_model_lens([member.url], self._token)
                return True
            except WorkerError as error:
                if time.monotonic() + pause_s > deadline:
                    logger.error("%s gets no rollouts until its next start: %s", member.name, error)
                    return False
                logger.warning("%s gets no rollouts yet; next attempt in %.0f s: %s", member.name, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return False


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def fetch_max_model_lens(urls: list[str], token: str) -> list[int | None]:
    """Return the longest sequence of each server in tokens; None if the server does not say.

    A server that does not answer, because it is being restarted, is taken to be like the shortest of the others.

    Raises:
        WorkerError: no server answers.
    """
    async with open_session() as session:
        answers = await asyncio.gather(*(_max_model_len(session, url, token) for url in urls), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors and (len(errors) == len(urls) or not all(isinstance(error, WorkerError) for error in errors)):
        raise errors[0]
    shortest = min((answer for answer in answers if isinstance(answer, int)), default=None)
    return [shortest if isinstance(answer, BaseException) else answer for answer in answers]


async def _max_model_len(session: aiohttp.ClientSession, url: str, token: str) -> int | None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    try:
        async with session.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=timeout) as response:
            content = await response.read()
            if response.status == 404:
                return None
            if response.status != 200:
                text = content[:300].decode(errors="replace")
                raise WorkerError(f"{url}/v1/models: got status {response.status}, expected 200: {text}")
        models = msgspec.json.decode(content, type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise WorkerError(f"{url}/v1/models: {type(error).__name__}: {error}") from error
    return models[0].max_model_len if models else None
