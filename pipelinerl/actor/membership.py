"""Which servers accept rollouts: those that are up and have the weights.

The launcher reports which servers are up, the trainer which of their starts have weights, both on the stream `pool`.
When a server goes away, its rollouts are moved at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from pipelinerl.actor.scheduler import Scheduler, WorkerPool
from pipelinerl.actor.worker_messages import Servers
from pipelinerl.errors import WorkerError
from pipelinerl.llm.client import open_session
from pipelinerl.records import PoolAnswer, PoolChange, ServerReady

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 60.0


@dataclass(eq=False)
class _Member:
    """One server. `generation` is its newest start."""

    index: int
    name: str
    url: str
    generation: int = 0
    is_up: bool = True


class Membership:
    """The servers of a run, numbered as in `scheduler`.

    Args:
        urls: of the planned servers, by name. They count as up, with weights.
        scheduler: is told which servers accept rollouts.
        workers: are told about servers that join.
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
        # The newest start with weights, by server; the trainer's message may arrive before the launcher's.
        self._ready = dict.fromkeys(urls, 0)
        self._servers: Servers | None = None

    async def begin(self) -> None:
        """Tell the workers about all servers and wait until they are ready.

        Raises:
            WorkerError: no server answers, or a worker is not ready in time.
        """
        longest = await fetch_max_model_len([member.url for member in self._members.values()], self._token)
        self._servers = Servers([member.url for member in self._members.values()], longest)
        await self._workers.wait_ready(self._servers)

    def apply_change(self, change: PoolChange) -> None:
        """Handle what the launcher reports about a server."""
        if change.incarnation != self._incarnation:
            return
        member = self._members.get(change.name)
        if change.event == "up":
            if member is None:
                member = _Member(self._scheduler.add_server(), change.name, change.url)
                self._members[change.name] = member
                if self._servers is not None:
                    self._servers.urls.append(change.url)
                    self._workers.set_servers(self._servers)
            member.generation, member.is_up = change.generation, True
        elif member is None:
            return
        else:
            member.is_up = False
        self._refresh(member)
        if change.event == "down":
            lost = self._workers.fail_rollouts_of(member.index)
            logger.warning("%s was lost (%s); %d rollouts restart elsewhere", change.name, change.reason, lost)

    def apply_answer(self, answer: PoolAnswer) -> None:
        """Handle what the trainer reports about a server."""
        if answer.incarnation != self._incarnation or not isinstance(answer, ServerReady):
            return
        self._ready[answer.name] = answer.generation
        if answer.name in self._members:
            self._refresh(self._members[answer.name])

    def _refresh(self, member: _Member) -> None:
        has_weights = member.is_up and self._ready.get(member.name) == member.generation
        if has_weights != self._scheduler.servers[member.index].usable:
            logger.info("%s accepts %s rollouts", member.name, "new" if has_weights else "no more")
            self._scheduler.set_usable(member.index, has_weights)


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def fetch_max_model_len(urls: list[str], token: str) -> int | None:
    """Return the longest sequence in tokens that all servers accept; None if unknown.

    All servers of a run have the same model and arguments, so not all of them have to answer.

    Raises:
        WorkerError: no server answers.
    """
    async with open_session() as session:
        answers = await asyncio.gather(*(_max_model_len(session, url, token) for url in urls), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if len(errors) == len(urls):
        raise errors[0]
    return min((answer for answer in answers if isinstance(answer, int)), default=None)


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
