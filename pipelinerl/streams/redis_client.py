"""Connections to the Redis (or Valkey) server that holds a run's streams, and what is asked of such a server.

Called by the stream hub and the Redis reader and writer. A command waits out a lost connection for `OUTAGE_RETRIES`
attempts with growing pauses (about half a minute), so that a server that is restarted costs nothing but time.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from pipelinerl.errors import StreamError
from pipelinerl.streams.base import StreamSpec

OUTAGE_RETRIES = 33
# Enough for a server that is just being started again; a wrong password should not take half a minute to show.
CHECK_RETRIES = 5
MAX_PAUSE_S = 1.0
SOCKET_TIMEOUT_S = 30.0
MIN_VERSION = (6, 2)
# A log can be read from any offset; the places that are named to a reader are so far apart.
LOG_STRIDE = 64
_SCHEME = re.compile(r"[a-z]+", re.I)
_SOURCES = "(PIPELINERL_REDIS_URL, else streams.url)"


def connect(url: str, retries: int = OUTAGE_RETRIES) -> redis.Redis:
    """Return a client. Nothing is sent yet.

    Raises:
        StreamError: `url` is not a Redis URL.
    """
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            retry=Retry(ExponentialBackoff(cap=MAX_PAUSE_S, base=0.05), retries),
        )
    except ValueError:
        # Not the error itself: of a password with a slash in it, it quotes a part.
        raise StreamError(
            f"the address {shown(url)} {_SOURCES} cannot be used, expected redis://:PASSWORD@HOST:PORT/0 (or rediss:, "
            "unix:). Write special characters of the password as in a URL: / is %2F, @ is %40, ? is %3F, # is %23"
        ) from None


def check_server(client: redis.Redis, url: str) -> None:
    """Refuse a server that would lose records.

    Raises:
        StreamError: not reachable, wrong password, too old, or it may evict keys.
    """
    try:
        info = client.info()
    except redis.RedisError as error:
        raise StreamError(
            f"the Redis server {shown(url)} does not answer: {error}. Check the address {_SOURCES} and the password; "
            "an address with a password, redis://:PASSWORD@HOST:PORT/0, goes into PIPELINERL_REDIS_URL"
        ) from error
    version = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2])
    if version < MIN_VERSION:
        raise StreamError(f"the Redis server {shown(url)} is version {version}, streams need {MIN_VERSION} or later")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StreamError(
            f"the Redis server {shown(url)} has the eviction policy {policy!r} and could drop records silently. "
            "Set maxmemory-policy noeviction on it"
        )


class StreamKeys(NamedTuple):
    """Keys of one stream: the log, the number of records ever written, the bytes in the log now, a hash with the next
    offset of each consumer, and a stream of one entry that is renewed when a consumer moves on."""

    log: str
    written: str
    size: str
    consumed: str
    notice: str


def stream_keys(run_id: str, spec: StreamSpec) -> StreamKeys:
    """The run id keeps runs on one server apart; the braces keep the keys of a stream on one node of a cluster."""
    base = f"{{pipelinerl:{run_id}:{spec.topic}:{spec.instance}:{spec.partition}}}"
    return StreamKeys(*(f"{base}:{name}" for name in ("log", "count", "size", "consumed", "notice")))


def log_places(client: redis.Redis, keys: StreamKeys) -> list[int]:
    """Ascending offsets in a stream's log, LOG_STRIDE apart, from the oldest record that it still holds.

    Raises:
        StreamError: the server does not answer.
    """
    try:
        ends: list[Any] = [client.xrange(keys.log, count=1), client.xrevrange(keys.log, count=1)]
    except redis.RedisError as error:
        raise StreamError(f"stream {keys.log}: the server does not answer: {error}") from error
    if not all(ends):
        return []
    # Offset n has the id n+1.
    first, last = (int(rows[0][0].split(b"-")[0]) - 1 for rows in ends)
    return list(range(first, last + 1, LOG_STRIDE))


def shown(url: str) -> str:
    """`url` without user name, password and options, also if the password is not written as in a URL."""
    scheme, is_there, rest = url.partition("://")
    if not is_there or _SCHEME.fullmatch(scheme) is None:
        scheme, rest = "", url
    before, at, place = rest.rpartition("@")
    if at and "?" in before and "=" in before.partition("?")[2]:
        # Either a password with ? and = in it, or an option with @ in it: what is not secret cannot be told.
        place = "(hidden)"
    return f"{scheme}://{place.partition('?')[0]}"
