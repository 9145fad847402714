"""The connection of the trainer with one server: its control client, its transfer group, one update at a time.

The publisher runs the coroutines of all links on one event loop and feeds every link the same packed buffers from the
trainer's thread. A link that failed swallows what it is fed, so that it never holds the others up.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.adapter_manifest import adapter_problems
from pipelinerl.weights.control import ControlClient, KVCache
from pipelinerl.weights.manifest import coverage_problems
from pipelinerl.weights.packing import TensorMeta
from pipelinerl.weights.report import ServerAddress, ServerUpdate
from pipelinerl.weights.threads import in_thread
from pipelinerl.weights.transport import Transport

#: Buffers that may wait for one server; more would only hold memory.
_OUTBOX_BUFFERS = 2
#: Of the time of an attempt, how long one server may keep the trainer from the others, which need the rest.
_STALL_SHARE = 0.5
#: Of the time of an attempt, what the server may use for an update in one call.
_SERVER_SHARE = 0.9


class ServerLink:
    """One server and the group that carries weights to it.

    Args:
        address: the server.
        client: its control client.
        make_transport: opens a fresh transport; called again after a failure.
        timeout_s: limit of one attempt at connecting or updating.
        kv_cache: what happens to the KV cache of running requests at an update.
        one_call: update in one call if the server offers it.
        base_print: of the frozen model that an adapter belongs to; None: not compared.
    """

    def __init__(
        self,
        address: ServerAddress,
        client: ControlClient,
        make_transport: Callable[[], Transport],
        timeout_s: float,
        kv_cache: KVCache,
        one_call: bool = True,
        base_print: str | None = None,
    ) -> None:
        self.address = address
        self.client = client
        self.error: str | None = None
        #: Of the server's weights, once it is connected and if it says so.
        self.dtype: str | None = None
        #: It came while the run was going on: what is wrong with it is its own trouble.
        self.joined_later = False
        #: Set when the server is known to be gone, so that no second attempt is made.
        self.gone: str | None = None
        self._make_transport = make_transport
        self._timeout_s = timeout_s
        self._kv_cache: KVCache = kv_cache
        self._transport: Transport | None = None
        self._expected: Mapping[str, tuple[int, ...]] | None = None
        self._tied = False
        #: Of the largest adapter that fits, if the server takes one in place of a model.
        self._adapter_rank: int | None = None
        self._base_print = base_print
        self._server_print: str | None = None
        self._one_call = one_call
        self._takes_whole_updates = False
        self._phase = "connect"
        self._outbox: queue.Queue[torch.Tensor | None] = queue.Queue(_OUTBOX_BUFFERS)
        self._took_buffer_at = time.monotonic()
        #: What `sleep` took from the server and no update has given back yet.
        self._asleep = False

    @property
    def name(self) -> str:
        return self.address.name

    async def connect(self) -> None:
        """Form the group, whatever state an earlier trainer or a failed update left the server in.

        Raises:
            WeightSyncError: the server did not answer in time, or its answer is quoted.
        """
        async with self._attempt("connect"):
            self.close()
            await self.client.abort_update()
            info = await self.client.model_info()
            tensors = info.get("tensors")
            self._expected = None if tensors is None else {name: tuple(shape) for name, shape in tensors.items()}
            self._tied = bool(info.get("tied", False))
            self._adapter_rank = info.get("adapter_rank")
            self._server_print = info.get("base_print")
            dtype = info.get("dtype")
            self.dtype = None if dtype is None else str(dtype)
            self._takes_whole_updates = self._one_call and bool(info.get("whole_update", False))
            self._transport = transport = self._make_transport()
            init_info = transport.prepare(await self.client.world_size())
            await _together(self.client.init_engine(init_info), in_thread(f"weights-join-{self.name}", transport.join))
            self.error = None

    def check(self, metas: list[TensorMeta]) -> None:
        """Compare what is to be sent with the server's model, before anything is paused.

        Raises:
            WeightSyncError: tensors are missing, unknown or of another shape; sending again cannot help.
        """
        sent = {meta.name: meta.shape for meta in metas}
        if self._adapter_rank is not None:
            problems = adapter_problems(self._expected, sent, self._adapter_rank)
            problems += self._other_base(metas)
        elif self._expected is not None:
            problems = coverage_problems(self._expected, sent, self._tied)
        else:
            return
        if problems:
            raise WeightSyncError(self.name, "the update does not fit the server's model: " + "; ".join(problems))

    def _other_base(self, metas: list[TensorMeta]) -> list[str]:
        """Why the frozen model, which the server read itself, has not the weights of the trainer's."""
        problems = []
        if others := sorted({meta.dtype_name for meta in metas} - {self.dtype}):
            problems.append(
                f"its base model is in {self.dtype}, the trainer computes with values of {', '.join(others)}: set "
                f"vllm_config.vllm_kwargs.dtype={others[0]}, or finetune.lora.sync=merged"
            )
        if None not in (self._base_print, self._server_print) and self._base_print != self._server_print:
            problems.append(
                "its model folder has other weights than the trainer read: model_path must stay as it is for the whole "
                "run, on every machine; or set finetune.lora.sync=merged"
            )
        return problems

    async def update(self, version: int, metas: list[TensorMeta], pass_id: int) -> ServerUpdate:
        """One round: pause, start, transfer, load, resume. Buffers come through `feed`, sealed for pass `pass_id`.

        Raises:
            WeightSyncError: with the phase and the quoted error; the server is left paused.
        """
        if self._takes_whole_updates:
            return ServerUpdate(self.name, await self._update_in_one_call(version, metas, pass_id))
        seconds: dict[str, float] = {}
        async with self._attempt("pause"):
            with self._timed("pause", seconds):
                if self._asleep:
                    # Before the pause: a server that is fully awake after this call has resumed.
                    await self.client.wake("weights")
                await self.client.pause(self._kv_cache)
            with self._timed("start", seconds):
                await self.client.start_update()
            with self._timed("transfer", seconds):
                received = self.client.receive_update(metas, pass_id)
                await _together(received, in_thread(f"weights-send-{self.name}", self._send_all))
            with self._timed("load", seconds):
                await self.client.finish_update(version)
            with self._timed("resume", seconds):
                if self._asleep:
                    await self.client.wake("kv_cache")
                    self._asleep = False
                await self.client.resume()
        return ServerUpdate(self.name, seconds)

    async def _update_in_one_call(self, version: int, metas: list[TensorMeta], pass_id: int) -> dict[str, float]:
        """The round as one call; buffers are on their way while the server still pauses. Returns seconds by phase."""
        seconds: dict[str, float] = {}

        async def call() -> None:
            # The server's limit comes first: what it gives up it does not resume.
            limit_s = _SERVER_SHARE * self._timeout_s
            answer = self.client.whole_update(metas, pass_id, version, self._kv_cache, self._asleep, limit_s)
            seconds.update(await answer)

        async with self._attempt("update"):
            await _together(call(), in_thread(f"weights-send-{self.name}", self._send_all))
            self._asleep = False
        return seconds

    async def sleep(self, level: int) -> None:
        """Let the server leave its GPU (see `ControlClient.sleep`) until the next update.

        Raises:
            WeightSyncError: it did not answer in time, or its answer is quoted.
        """
        async with self._attempt("sleep"):
            await self.client.sleep(level)
            self._asleep = level > 0

    def feed(self, buffer: torch.Tensor | None) -> None:
        """Hand the next buffer (None: that was the last) to this server. Called from the trainer's thread."""
        limit_s = _STALL_SHARE * self._timeout_s
        if self._outbox.empty():
            # It waited for the trainer, and not the other way round.
            self._took_buffer_at = time.monotonic()
        while self.error is None:
            # Since it took one, and not since now: a second server that hangs has used its time while the first did.
            left_s = self._took_buffer_at + limit_s - time.monotonic()
            try:
                # In short waits, because the link may fail meanwhile and nobody empties the queue any more.
                self._outbox.put(buffer, timeout=min(1.0, max(0.0, left_s)))
                return
            except queue.Full:
                if time.monotonic() >= self._took_buffer_at + limit_s:
                    self.error = f"phase {self._phase}: no buffer was taken for {limit_s:g} s"

    def begin_round(self) -> None:
        """Forget buffers of an earlier attempt. Call before `feed` and `update` of a round."""
        self._outbox = queue.Queue(_OUTBOX_BUFFERS)
        self._took_buffer_at = time.monotonic()

    def abandon(self, reason: str) -> None:
        """The server is gone: let whatever waits for it fail now. Any thread may call it."""
        self.gone = reason
        self._fail(reason)

    def close(self) -> None:
        """Leave the transfer group; the server keeps running."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _send_all(self) -> None:
        transport, outbox = self._transport, self._outbox
        if transport is None:
            raise RuntimeError("the transfer group is not connected")
        while (buffer := outbox.get(timeout=self._timeout_s)) is not None:
            self._took_buffer_at = time.monotonic()
            transport.send(buffer)

    @asynccontextmanager
    async def _attempt(self, phase: str) -> AsyncIterator[None]:
        """One attempt with a deadline; whatever goes wrong closes the group and becomes a WeightSyncError.

        A cancelled attempt closes the group as well.
        """
        self._phase = phase
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            self._fail(f"phase {self._phase}: no end after {self._timeout_s:g} s")
            raise WeightSyncError(self.name, str(self.error)) from error
        except (WeightSyncError, RuntimeError, OSError, ValueError, KeyError, queue.Empty) as error:
            self._fail(f"phase {self._phase}: {error or type(error).__name__}")
            raise WeightSyncError(self.name, str(self.error)) from error
        except asyncio.CancelledError:
            # Half an update may be on its way: the group is of no use, and its worker must not wait in it.
            self.close()
            raise

    def _fail(self, message: str) -> None:
        self.error = message
        # Frees a worker that waits in a broadcast: its peer is gone, so its call fails now.
        self.close()

    @contextmanager
    def _timed(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        self._phase = phase
        start = time.monotonic()
        yield
        seconds[phase] = time.monotonic() - start


async def _together(*calls: Coroutine[Any, Any, Any]) -> None:
    """Await all calls; the first error cancels the others and is raised as it is, not in a group."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # Of several errors the server's answer says most: it comes first in the list.
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
