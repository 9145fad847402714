"""Sends weights to all servers at once: what the trainer's loop calls on rank 0.

Waits for: the servers' control routes, the collectives of each server's group, the weight source. Every wait has
`timeout_s`. One server's failure costs only that server: it gets a second attempt with everything, then it is reported.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.buffers import packed_buffers
from pipelinerl.weights.control import ControlClient, KVCache, control_session
from pipelinerl.weights.gloo_group import local_address
from pipelinerl.weights.link import ServerLink
from pipelinerl.weights.packing import DEFAULT_CHUNK_BYTES, TensorMeta
from pipelinerl.weights.report import ServerAddress, ServerUpdate, UpdateReport
from pipelinerl.weights.source import WeightSource
from pipelinerl.weights.transport import Transport, TransportName, create_transport
from pipelinerl.weights.verify import ProbeResult, ProbeSequence, probe_servers

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

#: Added to a link's own deadline when the trainer's thread waits for it: the link reports first.
_MARGIN_S = 10.0


class WeightPublisher:
    """Sends versions of the weights to servers and verifies them. Use as a context manager, from one thread.

    Args:
        token: control token of the servers.
        transport: `gloo` (servers on CPUs) or `nccl` (servers on other GPUs).
        timeout_s: limit of one attempt (connecting, one update) at one server.
        kv_cache: `keep` continues running requests on their old KV cache, `recompute` computes it anew.
        master_address: address of this machine at which the servers' workers reach it.
        chunk_bytes: size of the packed buffers.
        transports: by server name, where one needs another transport (`ipc`: it shares the trainer's device).
        one_call: update in one call the servers that offer it; False: always phase by phase.
        base_print: of the frozen model that an adapter belongs to (`weights.base_print`); None: not compared.
    """

    def __init__(
        self,
        token: str,
        transport: TransportName = "gloo",
        timeout_s: float = 120.0,
        kv_cache: KVCache = "keep",
        master_address: str = "127.0.0.1",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        transports: Mapping[str, TransportName] | None = None,
        one_call: bool = True,
        base_print: str | None = None,
    ) -> None:
        self._token = token
        self._transport: TransportName = transport
        self._timeout_s = timeout_s
        self._kv_cache: KVCache = kv_cache
        self._master_address = master_address
        self._chunk_bytes = chunk_bytes
        # Transports are made in the thread of the event loop, where another GPU is current than here.
        self._transports = dict(transports or {})
        self._one_call = one_call
        self._base_print = base_print
        on_gpu = not {transport, *self._transports.values()}.isdisjoint(("nccl", "ipc")) and torch.cuda.is_available()
        self._device_index = torch.cuda.current_device() if on_gpu else None
        self._links: dict[str, ServerLink] = {}
        # Servers come and go in the thread that follows the pool, and their links are made on the event loop.
        self._lock = threading.Lock()
        self._joining: dict[str, Future[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-publisher", daemon=True)
        self._thread.start()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def servers(self) -> list[str]:
        """Names of the connected servers."""
        with self._lock:
            return list(self._links)

    def connect(self, servers: Sequence[ServerAddress], start_timeout_s: float | None = None) -> None:
        """Wait until `servers` are up and form one transfer group with each.

        Works on fresh servers and on servers that an earlier trainer left paused, in the middle of an update.

        Args:
            servers: all servers that get every version from now on, beside those already connected.
            start_timeout_s: how long they may take to come up; None for `timeout_s`.

        Raises:
            WeightSyncError: a server did not come up or refused; its error is quoted.
        """
        limit = self._timeout_s if start_timeout_s is None else start_timeout_s
        self._run(self._connect_all(servers, limit), limit + self._timeout_s)

    def join(
        self,
        address: ServerAddress,
        start_timeout_s: float,
        on_done: Callable[[ServerAddress, str | None], None],
        late: bool = True,
    ) -> None:
        """Connect one more server in the background, once it is up: the next `publish` reaches it. Any thread.

        Args:
            address: the server.
            start_timeout_s: how long it may take to come up.
            on_done: called on another thread with the error, or None when it is connected.
            late: it comes while the run goes on: should its model be another one, that is its own trouble.
        """
        self.drop(address.name, "it joins anew")

        async def join_now() -> None:
            link = self._new_link(self._open_session(), address)
            link.joined_later = late
            error: str | None = None
            try:
                await self._bring_up(link, start_timeout_s)
            except WeightSyncError as failure:
                error = str(failure)
            except BaseException:
                link.close()
                raise
            with self._lock:
                if self._joining.get(address.name) is not future:
                    link.close()
                    return
                del self._joining[address.name]
                if error is None:
                    self._links[address.name] = link
            on_done(address, error)

        with self._lock:
            future = self._submit(join_now())
            self._joining[address.name] = future

    def drop(self, name: str, reason: str) -> None:
        """Forget a server, connected or about to be; an update that is under way goes on without it. Any thread."""
        with self._lock:
            link = self._links.pop(name, None)
            joining = self._joining.pop(name, None)
        if joining is not None:
            joining.cancel()
        if link is not None:
            link.abandon(reason)

    def publish(self, version: int, source: WeightSource, names: Collection[str] | None = None) -> UpdateReport:
        """Give every server (or those of `names`) `version`. Blocks until they sample with it or were given up.

        A server that failed is connected anew and gets everything once more. If that fails too it is left paused,
        dropped from the connected servers and reported.

        Raises:
            WeightSyncError: the tensors of `source` do not fit a server's model (nothing was paused or sent), or a
                value does not fit the range of a server in float16.
        """
        started = time.monotonic()
        metas = source.metadata()
        chosen = self._chosen(names)
        refused = _refused(chosen, metas)
        links = [link for link in chosen if link.name not in refused]
        # A pass of the source may be a collective: it is made only if somebody takes it.
        updated, failed = self._round(version, source, metas, links) if links else ([], [])
        first_errors = {link.name: str(link.error) for link in failed}
        if failed:
            logger.warning("update to version %d failed, trying again: %s", version, first_errors)
            recovered, failed = self._recover(version, source, metas, failed)
            updated += [replace(update, recovered_from=first_errors[update.name]) for update in recovered]
        errors = {link.name: f"{link.error} (first attempt: {first_errors[link.name]})" for link in failed} | refused
        with self._lock:
            for link in chosen:
                # A server that was started again meanwhile has another link by now, which stays.
                if link.name in errors and self._links.get(link.name) is link:
                    del self._links[link.name]
        sent_bytes = sum(meta.num_bytes for meta in metas)
        return UpdateReport(version, updated, errors, time.monotonic() - started, sent_bytes)

    def _chosen(self, names: Collection[str] | None) -> list[ServerLink]:
        with self._lock:
            return [link for link in self._links.values() if names is None or link.name in names]

    def sleep(self, level: int) -> None:
        """Let all servers leave their GPUs until the next `publish` (see `ControlClient.sleep`); no request may run.

        Raises:
            WeightSyncError: a server did not.
        """

        async def all_sleep() -> None:
            await asyncio.gather(*(link.sleep(level) for link in links))

        links = self._chosen(None)
        self._run(all_sleep(), self._timeout_s)

    def probe(self, sequences: Sequence[ProbeSequence], names: Collection[str] | None = None) -> ProbeResult:
        """Compare the trainer's log-probs with those that every connected server (or `names`) computes afresh.

        Raises:
            WeightSyncError: a server did not answer in time, or with something else than log-probs.
        """
        links = self._chosen(names)
        if not links and names:
            raise WeightSyncError(", ".join(names), "it is not connected any more")
        clients = [link.client for link in links]
        result = self._run(probe_servers(clients, sequences, self._timeout_s), self._timeout_s)
        return replace(result, server_dtypes={link.name: link.dtype for link in links if link.dtype})

    def close(self) -> None:
        """Leave all groups and stop the thread. The servers keep running with what they have."""
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

    def _recover(
        self, version: int, source: WeightSource, metas: list[TensorMeta], links: list[ServerLink]
    ) -> tuple[list[ServerUpdate], list[ServerLink]]:
        """Connect failed servers anew and send them everything. Returns what worked and what did not."""
        futures = {link.name: self._submit(link.connect()) for link in links if link.gone is None}
        for link in links:
            if link.name in futures:
                self._outcome(link, futures[link.name])
        connected = [link for link in links if link.error is None and link.gone is None]
        updated, failed = self._round(version, source, metas, connected) if connected else ([], [])
        return updated, failed + [link for link in links if link not in connected]

    def _round(
        self, version: int, source: WeightSource, metas: list[TensorMeta], links: list[ServerLink]
    ) -> tuple[list[ServerUpdate], list[ServerLink]]:
        """One update of `links`, all at once. Returns the updates that worked and the links that failed."""
        # No buffer of another pass, of this version or an earlier one, has a seal that fits this number.
        pass_id = secrets.randbits(63)
        in_half = [link.name for link in links if link.dtype == "float16"]
        buffers = packed_buffers(source, metas, self._chunk_bytes, pass_id, in_half)
        # The first buffer is ready before anybody is paused.
        staged = next(buffers, None)
        for link in links:
            link.begin_round()
        futures = {link.name: self._submit(link.update(version, metas, pass_id)) for link in links}
        try:
            while staged is not None:
                for link in links:
                    link.feed(staged)
                staged = next(buffers, None)
            for link in links:
                link.feed(None)
        except BaseException:
            # The source broke: half-sent servers stay paused, and no link waits for the rest.
            for future in futures.values():
                future.cancel()
            raise
        outcomes = {link.name: self._outcome(link, futures[link.name]) for link in links}
        updated = [outcome for outcome in outcomes.values() if isinstance(outcome, ServerUpdate)]
        return updated, [link for link in links if outcomes[link.name] is None]

    def _outcome(self, link: ServerLink, future: Future[Result]) -> Result | None:
        """The result of a link's coroutine, or None if it failed (the link then holds the error)."""
        try:
            return future.result(self._timeout_s + _MARGIN_S)
        except WeightSyncError as error:
            link.error = link.error or str(error)
        except TimeoutError:
            link.error = link.error or f"no end after {self._timeout_s:g} s"
            future.cancel()
            # The event loop may be what is stuck, so the cancelled coroutine may never get to it.
            link.close()
        return None

    async def _connect_all(self, servers: Sequence[ServerAddress], start_timeout_s: float) -> None:
        session = self._open_session()
        links = [self._new_link(session, address) for address in servers]
        await asyncio.gather(*(self._bring_up(link, start_timeout_s) for link in links))
        with self._lock:
            self._links.update({link.name: link for link in links})

    def _open_session(self) -> aiohttp.ClientSession:
        """The one session of all links; called on the event loop."""
        if self._session is None:
            self._session = control_session(self._token)
        return self._session

    async def _bring_up(self, link: ServerLink, start_timeout_s: float) -> None:
        try:
            async with asyncio.timeout(start_timeout_s):
                await link.client.wait_healthy()
        except TimeoutError as error:
            message = f"{link.address.url}/health did not answer within {start_timeout_s:g} s"
            raise WeightSyncError(link.name, message) from error
        await link.connect()

    def _new_link(self, session: aiohttp.ClientSession, address: ServerAddress) -> ServerLink:
        def make_transport() -> Transport:
            return create_transport(
                self._transports.get(address.name, self._transport),
                meeting_address(self._master_address, address.url),
                address.group_port,
                self._timeout_s,
                self._chunk_bytes,
                self._device_index,
            )

        client = ControlClient(session, address.name, address.url)
        return ServerLink(
            address, client, make_transport, self._timeout_s, self._kv_cache, self._one_call, self._base_print
        )

    def _submit(self, call: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _run(self, call: Coroutine[Any, Any, Result], limit_s: float) -> Result:
        return self._submit(call).result(limit_s + _MARGIN_S)


def _refused(links: list[ServerLink], metas: list[TensorMeta]) -> dict[str, str]:
    """Servers that joined in mid run and have another model, with what differs; WeightSyncError if an old one has."""
    refused = {}
    for link in links:
        try:
            link.check(metas)
        except WeightSyncError as error:
            if not link.joined_later:
                raise
            link.close()
            refused[link.name] = str(error)
    return refused


def meeting_address(master_address: str, url: str) -> str:
    """Where the workers of the server at `url` reach this machine: a server of another machine cannot use loopback."""
    host = urlsplit(url).hostname or ""
    if not _is_loopback(master_address) or _is_loopback(host):
        return master_address
    return local_address(host, urlsplit(url).port or 80)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
