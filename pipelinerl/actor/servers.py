"""Asks the servers for what the actor has to know about them. Called when they have their first weights."""

from __future__ import annotations

import aiohttp
import msgspec

from pipelinerl.actor.frames import Servers
from pipelinerl.errors import WorkerError
from pipelinerl.llm.client import open_session

_TIMEOUT_S = 60.0


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def fetch_max_model_lens(urls: list[str], token: str) -> Servers:
    """Return the longest sequence of each server, in tokens; None where the server does not say.

    A server that is just being started again does not answer: it is taken to be like the shortest of the others.

    Raises:
        WorkerError: no server answers the question.
    """
    lengths: list[int | None] = []
    silent: dict[int, WorkerError] = {}
    async with open_session() as session:
        for index, url in enumerate(urls):
            try:
                lengths.append(await _max_model_len(session, url, token))
            except WorkerError as error:
                lengths.append(None)
                silent[index] = error
    if silent and len(silent) == len(urls):
        raise silent[0]
    known = [length for length in lengths if length is not None]
    for index in silent:
        lengths[index] = min(known, default=None)
    return Servers(lengths, list(urls))


async def _max_model_len(session: aiohttp.ClientSession, url: str, token: str) -> int | None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with session.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=timeout) as response:
            content = await response.read()
            if response.status == 404:
                return None
            if response.status != 200:
                raise WorkerError(
                    f"{url}/v1/models: status {response.status}: {content[:300].decode(errors='replace')}"
                )
        models = msgspec.json.decode(content, type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise WorkerError(f"{url}/v1/models: {type(error).__name__}: {error}") from error
    return models[0].max_model_len if models else None
