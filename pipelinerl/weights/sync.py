"""Gives the servers new weights: `WeightPublisher.publish` is one update of all servers.

All servers are updated at the same time, each over a transfer group of its own (see `link`), so a dead or stuck server
costs only its own group. Every wait has a deadline. A server that fails is connected again and gets everything a second
time; if that fails too it stays paused and is reported, and has to be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.buffers import (
    DEFAULT_CHUNK_BYTES,
    TensorMeta,
    WeightSource,
    packed_buffers,
    update_info_of,
    update_problems,
)
from pipelinerl.weights.link import (
    ControlClient,
    KVCache,
    ServerAddress,
    ServerLink,
    ServerUpdate,
    control_session,
    is_loopback,
)
from pipelinerl.weights.transport import Sender, SenderOptions, local_address, open_sender
from pipelinerl.world.jobs import CPU_TRANSPORT, transport_named

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

#: The phases of an update, in order. In `pause` the server still finishes the steps in progress; `load` is what it does
#: after the last byte arrived.
PHASES = ("pause", "transfer", "load", "resume")
#: Added to a link's deadline where the trainer's thread waits for it, so that the link reports first.
_MARGIN_S = 10.0


@dataclass(frozen=True)
class UpdateReport:
    """The outcome of one update over all servers.

    Attributes:
        version: the policy version that was sent.
        updated: servers that have it.
        failed: name -> quoted error of servers that failed twice. They are left paused and have to be restarted.
        total_s: wall-clock seconds of the whole call.
        sent_bytes: size of the tensors that each server got.
        generations: which start of each of these servers it was.
    """

    version: int
    updated: list[ServerUpdate] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    total_s: float = 0.0
    sent_bytes: int = 0
    generations: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase of the slowest server, `paused` of the one paused longest, and `total`."""
        seconds = {"total": self.total_s, "paused": self.paused_s}
        for phase in PHASES:
            seconds[phase] = max((update.seconds.get(phase, 0.0) for update in self.updated), default=0.0)
        return seconds

    @property
    def paused_s(self) -> float:
        """Longest time that a server was paused; the whole call if one failed or needed a second attempt."""
        if self.failed or any(update.recovered_from for update in self.updated):
            return self.total_s
        sums = [sum(update.seconds.get(phase, 0.0) for phase in PHASES) for update in self.updated]
        return min(self.total_s, max(sums, default=0.0))

    @property
    def num_servers(self) -> int:
        return len(self.updated)


@dataclass(frozen=True)
class ProbeSequence:
    """At least two tokens and the trainer's log-probs of them: `logprobs[i]` is log p(token_ids[i + 1] |
    token_ids[: i + 1]) in nats at temperature 1, so there is one fewer than ids."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class ProbeResult:
    """|log-prob difference| between the trainer and one server, in nats, over `num_tokens` tokens.

    `server_dtype`: of the server's weights, such as `bfloat16`; None: not told.
    """

    mean_abs_diff: float
    max_abs_diff: float
    num_tokens: int
    server_dtype: str | None = None


class WeightPublisher:
    """Sends versions of the weights to servers and verifies them. Use as a context manager, from one thread.

    HTTP calls and links run on an event loop in a thread of the publisher.

    Args:
        token: control token of the servers.
        transport: one of `TRANSPORTS`.
        timeout_s: limit of one attempt (connecting, one update) at one server.
        kv_cache: `keep` continues running requests on their old KV cache, `recompute` computes it again.
        master_address: address of this machine at which the servers' workers reach it.
        chunk_bytes: size of the packed buffers.
        transports: by server name, where one needs another transport.
        base_checksum: of the frozen model that adapters belong to (`manifest.folder_checksum`); None: not compared.
    """

    def __init__(
        self,
        token: str,
        transport: str = CPU_TRANSPORT,
        timeout_s: float = 120.0,
        kv_cache: KVCache = "keep",
        master_address: str = "127.0.0.1",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        transports: Mapping[str, str] | None = None,
        base_checksum: str | None = None,
    ) -> None:
        self._token = token
        self._transport = transport
        self._timeout_s = timeout_s
        self._kv_cache: KVCache = kv_cache
        self._master_address = master_address
        self._chunk_bytes = chunk_bytes
        self._transports = dict(transports or {})
        self._base_checksum = base_checksum
        # Senders are made in the event loop's thread, where another GPU is current than here.
        used = {transport, *self._transports.values()}
        on_cpu = all(transport_named(name).on_cpu for name in used) or not torch.cuda.is_available()
        self._device_index = None if on_cpu else torch.cuda.current_device()
        # Servers come and go in the thread that follows the pool, and their links are made on the event loop.
        self._lock = threading.Lock()
        self._links: dict[str, ServerLink] = {}
        self._joining: dict[str, Future[WeightSyncError | None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-publisher", daemon=True)
        self._thread.start()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def servers(self) -> list[str]:
        """Names of the connected servers."""
        with self._lock:
            return list(self._links)

    def publish(self, version: int, source: WeightSource, names: Collection[str] | None = None) -> UpdateReport:
        """Give every server (or those of `names`) `version`. Blocks until each one samples with it or has failed.

        Raises:
            WeightSyncError: the tensors of `source` do not fit a server's model (nothing was paused or sent), or a
                value does not fit the range of a server in float16.
        """
        started = time.monotonic()
        metas = source.metadata()
        chosen = self._chosen(names)
        errors = self._misfits(chosen, metas)
        links = [link for link in chosen if link.name not in errors]
        updated = self._round(version, source, metas, links)
        if failed := _without(links, updated):
            first = {link.name: str(link.error) for link in failed}
            logger.warning("update to version %d failed, trying again: %s", version, first)
            connected = self._reconnect(failed)
            for update in self._round(version, source, metas, connected):
                updated.append(replace(update, recovered_from=first[update.name]))
            errors |= {
                link.name: f"{link.error} (first attempt: {first[link.name]})" for link in _without(failed, updated)
            }
        with self._lock:
            for link in chosen:
                # A server that was restarted meanwhile has another link by now, which stays.
                if link.name in errors and self._links.get(link.name) is link:
                    del self._links[link.name]
        sent_bytes = sum(meta.num_bytes for meta in metas)
        generations = {link.name: link.address.generation for link in chosen}
        return UpdateReport(version, updated, errors, time.monotonic() - started, sent_bytes, generations)

    def _misfits(self, links: list[ServerLink], metas: list[TensorMeta]) -> dict[str, str]:
        """Late servers with another model, by name, with what differs. Sending again cannot help.

        Raises:
            WeightSyncError: a server of the start has another model.
        """
        sent = {meta.name: meta.shape for meta in metas}
        dtypes = sorted({meta.dtype_name for meta in metas})
        refused = {}
        for link in links:
            if problems := update_problems(link.model, sent, dtypes, self._base_checksum):
                error = "the update does not fit the server's model: " + "; ".join(problems)
                if not link.is_late:
                    raise WeightSyncError(link.name, error)
                link.close()
                refused[link.name] = error
        return refused

    def _round(
        self, version: int, source: WeightSource, metas: list[TensorMeta], links: list[ServerLink]
    ) -> list[ServerUpdate]:
        """One attempt at updating `links`, all at once; returns the updates that worked. Failed links have an error."""
        # A pass over the source may be a collective: it is made only if a server needs it.
        if not links:
            return []
        # Buffers of other passes have other checksums, so that none is mistaken for one of this pass.
        pass_id = secrets.randbits(63)
        in_half = [link.name for link in links if link.model.dtype == "float16"]
        buffers = packed_buffers(source, metas, self._chunk_bytes, pass_id, in_half)
        # The first buffer is packed before any server is paused.
        buffer = next(buffers, None)
        for link in links:
            link.begin_round()
        info = update_info_of(metas, self._chunk_bytes, pass_id)
        futures = {link: self._submit(link.update(version, info)) for link in links}
        try:
            while buffer is not None:
                for link in links:
                    link.feed(buffer)
                buffer = next(buffers, None)
            for link in links:
                link.feed(None)
        except BaseException:
            # The source failed: half-loaded servers stay paused, and no link waits for the rest.
            for future in futures.values():
                future.cancel()
            raise
        outcomes = [self._outcome(link, future) for link, future in futures.items()]
        return [update for update in outcomes if update is not None]

    def _reconnect(self, links: list[ServerLink]) -> list[ServerLink]:
        """Connect failed links again; returns those that are connected."""
        futures = {link: self._submit(link.connect()) for link in links if link.gone is None}
        for link, future in futures.items():
            self._outcome(link, future)
        return [link for link in futures if link.error is None and link.gone is None]

    def _outcome(self, link: ServerLink, future: Future[Result]) -> Result | None:
        """The result of a link's coroutine, or None if it failed (the link then has the error)."""
        try:
            return future.result(self._timeout_s + _MARGIN_S)
        except WeightSyncError as error:
            link.error = link.error or str(error)
        except TimeoutError:
            link.error = link.error or f"no end after {self._timeout_s:g} s"
            future.cancel()
            # The event loop may be what is stuck, and then the cancelled coroutine never closes the group.
            link.close()
        return None

    def connect(self, servers: Sequence[ServerAddress], start_timeout_s: float | None = None) -> None:
        """Wait until `servers` are up and form a transfer group with each.

        Works on new servers and on servers that an earlier trainer left paused in the middle of an update.

        Args:
            servers: get every version from now on, like those that are connected already.
            start_timeout_s: how long they may take to come up; None for `timeout_s`.

        Raises:
            WeightSyncError: a server did not come up or refused; its error is quoted.
        """
        limit_s = self._timeout_s if start_timeout_s is None else start_timeout_s
        joining = [self.join(address, limit_s, is_late=False) for address in servers]
        for future in as_completed(joining, limit_s + self._timeout_s + _MARGIN_S):
            if error := future.result():
                raise error

    def join(
        self,
        address: ServerAddress,
        start_timeout_s: float,
        on_done: Callable[[ServerAddress, str | None], object] = lambda address, error: None,
        is_late: bool = True,
    ) -> Future[WeightSyncError | None]:
        """Connect one more server in the background, once it is up: the next `publish` reaches it. Any thread.

        Args:
            start_timeout_s: how long it may take to come up.
            on_done: called on another thread with the error, or None when it is connected.
            is_late: it joins during the run: if its model does not fit, only that server is refused.

        Returns:
            A future with the error, or None when it is connected.
        """
        self.drop(address.name, "it joins again")

        async def join_now() -> WeightSyncError | None:
            link = self._new_link(address, is_late)
            failure: WeightSyncError | None = None
            try:
                await link.client.wait_healthy(start_timeout_s)
                await link.connect()
            except WeightSyncError as error:
                failure = error
            except BaseException:
                link.close()
                raise
            with self._lock:
                if self._joining.get(address.name) is not future:
                    link.close()
                    return failure
                del self._joining[address.name]
                if failure is None:
                    self._links[address.name] = link
            on_done(address, None if failure is None else str(failure))
            return failure

        with self._lock:
            future = self._submit(join_now())
            self._joining[address.name] = future
        return future

    def drop(self, name: str, reason: str) -> None:
        """Forget a server, connected or about to be; an update that is under way continues without it. Any thread."""
        with self._lock:
            link = self._links.pop(name, None)
            joining = self._joining.pop(name, None)
        if joining is not None:
            joining.cancel()
        if link is not None:
            link.abandon(reason)

    def sleep(self, level: int) -> None:
        """Let all servers leave their GPUs until the next `publish` (see `ServerLink.sleep`); no request may run.

        Raises:
            WeightSyncError: a server did not.
        """
        links = self._chosen(None)

        async def all_sleep() -> None:
            await asyncio.gather(*(link.sleep(level) for link in links))

        self._run(all_sleep(), self._timeout_s)

    def probe(self, sequences: Sequence[ProbeSequence], name: str) -> ProbeResult:
        """Compare the trainer's log-probs with those that the server `name` computes afresh.

        It is the only check that finds a server whose weights arrived but are not used (a packed copy, a stale cache).

        Raises:
            WeightSyncError: the server did not answer in time, or with something else than finite log-probs.
        """
        link = next(iter(self._chosen([name])), None)
        if link is None:
            raise WeightSyncError(name, "it is not connected any more")
        client = link.client

        async def ask() -> list[list[float]]:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*(client.prompt_logprobs(each.token_ids) for each in sequences))

        try:
            answers = self._run(ask(), self._timeout_s)
        except TimeoutError as error:
            raise WeightSyncError(name, f"the log-prob probe had no answer after {self._timeout_s:g} s") from error
        pairs = [zip(each.logprobs, theirs, strict=True) for each, theirs in zip(sequences, answers, strict=True)]
        differences = [abs(ours - theirs) for sequence in pairs for ours, theirs in sequence]
        if not all(math.isfinite(value) for value in differences):
            raise WeightSyncError(name, "the log-prob probe met a value that is not finite")
        mean = math.fsum(differences) / len(differences)
        return ProbeResult(mean, max(differences), len(differences), link.model.dtype)

    def close(self) -> None:
        """Leave all groups and stop the thread. The servers keep running with the weights that they have."""
        if self._loop.is_closed():
            return
        with self._lock:
            links, joining = list(self._links.values()), list(self._joining.values())
            self._links.clear()
            self._joining.clear()
        for future in joining:
            future.cancel()
        for link in links:
            link.close()
        if self._session is not None:
            self._run(self._session.close(), 0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_MARGIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _chosen(self, names: Collection[str] | None) -> list[ServerLink]:
        with self._lock:
            return [link for link in self._links.values() if names is None or link.name in names]

    def _new_link(self, address: ServerAddress, is_late: bool) -> ServerLink:
        """Called on the event loop, to which the session of all links belongs."""
        if self._session is None:
            self._session = control_session(self._token)

        def make_sender() -> Sender:
            here = rendezvous_address(self._master_address, address.url)
            transport = self._transports.get(address.name, self._transport)
            return open_sender(SenderOptions(transport, here, address.group_port, self._timeout_s, self._device_index))

        client = ControlClient(self._session, address.name, address.url)
        return ServerLink(address, client, make_sender, self._timeout_s, self._kv_cache, is_late)

    def _submit(self, call: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _run(self, call: Coroutine[Any, Any, Result], limit_s: float) -> Result:
        return self._submit(call).result(limit_s + _MARGIN_S)


def _without(links: list[ServerLink], updated: list[ServerUpdate]) -> list[ServerLink]:
    """The links that are not among the updated ones."""
    names = {update.name for update in updated}
    return [link for link in links if link.name not in names]


def rendezvous_address(master_address: str, url: str) -> str:
    """Where the workers of the server at `url` reach this machine: servers elsewhere cannot use its loopback."""
    host = urlsplit(url).hostname or ""
    if not is_loopback(master_address) or is_loopback(host):
        return master_address
    return local_address(host, urlsplit(url).port or 80)
