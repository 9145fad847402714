"""One server as the trainer sees it: its HTTP control routes, its transfer group, and one update, top to bottom.

No torch is imported here: the actor process uses `ControlClient` too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec

from pipelinerl.errors import WeightSyncError
from pipelinerl.records.completion import weight_label
from pipelinerl.weights.manifest import ServerModel

if TYPE_CHECKING:
    import torch

    from pipelinerl.weights.transport import Sender

logger = logging.getLogger(__name__)

KVCache = Literal["keep", "recompute"]
#: Route of our servers for one whole update (`inference.engine`).
UPDATE_PATH = "/pipelinerl/update"

_QUOTE_CHARACTERS = 800
_HEALTH_RETRY_S = 0.25
#: Buffers that may wait for one server; more would only hold memory.
_QUEUED_BUFFERS = 2
#: Share of `timeout_s` for which one server may block the trainer; the other servers need the rest.
_STALL_SHARE = 0.5


@dataclass(frozen=True)
class ServerAddress:
    """One server that receives weights.

    Attributes:
        name: for messages, for instance the job name.
        url: `http://host:port`.
        group_port: TCP port of this server's transfer group on the trainer's machine; None lets the system choose.
        generation: number of this start of the server.
    """

    name: str
    url: str
    group_port: int | None = None
    generation: int = 0


@dataclass(frozen=True)
class ServerUpdate:
    """One server that has the new weights and samples again; `seconds` by phase (see `sync.PHASES`)."""

    name: str
    seconds: dict[str, float]
    recovered_from: str | None = None


class ControlClient:
    """Control routes of the server at `url`. Callers set deadlines; a `WeightSyncError` quotes a bad answer."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str) -> None:
        self._session = session
        self.name = name
        self._url = url.rstrip("/")

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return once `/health` answers.

        Raises:
            WeightSyncError: it did not within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._is_healthy():  # noqa: ASYNC110 - a server that starts sends no event
                    await asyncio.sleep(_HEALTH_RETRY_S)
        except TimeoutError as error:
            raise WeightSyncError(self.name, f"{self._url}/health did not answer within {timeout_s:g} s") from error

    async def _is_healthy(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False  # not listening yet

    async def pause(self) -> None:
        """Freeze running requests; they keep their KV cache."""
        await self.post("/pause", params={"mode": "keep", "clear_cache": "false"})

    async def worker_call(self, method: str) -> Any:
        """Call a method of `inference.engine` in every worker; returns the answer of the first one."""
        return (await self.post("/collective_rpc", json={"method": method}))["results"][0]

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of `token_ids[1:]` in nats at temperature 1, computed in one full forward pass.

        Prompt log-probs ignore the temperature and do not read the prefix cache; the salt keeps others from reading
        what they leave there.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        salt = f"probe-{uuid.uuid4().hex}"
        body = {"model": "actor", "token_ids": token_ids, "cache_salt": salt, "sampling_params": sampling}
        entries = (await self.generate(body)).get("prompt_logprobs")
        try:
            # The first token has no log-prob; the others map token ids to values.
            pairs = zip(entries[1:], token_ids[1:], strict=True)  # type: ignore[index]
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (TypeError, KeyError, ValueError) as error:
            quoted = f"{str(entries)[:_QUOTE_CHARACTERS]!r} for {len(token_ids)} tokens"
            raise WeightSyncError(self.name, f"the log-prob probe got {quoted}") from error

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One token-in-token-out request."""
        return await self.post("/inference/v1/generate", json=body)

    async def get(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return await self._request("GET", path, **kwargs)

    async def post(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return await self._request("POST", path, **kwargs)

    async def _request(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            async with self._session.request(method, f"{self._url}{path}", **kwargs) as response:
                text = await response.text()
                if response.status != 200:
                    quoted = text[:_QUOTE_CHARACTERS]
                    raise WeightSyncError(self.name, f"{path} answered {response.status}: {quoted}")
                answer = await response.json() if text else {}
        except aiohttp.ClientError as error:
            raise WeightSyncError(self.name, f"{path} failed: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise WeightSyncError(self.name, f"{path}: got {str(answer)[:_QUOTE_CHARACTERS]!r}, expected a JSON object")
        return answer


def control_session(token: str) -> aiohttp.ClientSession:
    """A session for control calls: token in the header, no proxy, no timeout of its own (callers set deadlines)."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, connect=30),
        trust_env=False,
        # One connection per call: the server closes idle ones after 5 s and those of failed calls at once, and a call
        # on a connection that is being closed fails although nothing is wrong.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, a name or an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class ServerLink:
    """One server and the group that carries weights to it. Coroutines run on the publisher's event loop.

    A link that failed discards what it is fed, so that it never holds up the other servers.

    Args:
        address: the server.
        client: its control client.
        make_sender: opens a new transport; called again after a failure.
        timeout_s: limit of one attempt at connecting or updating.
        kv_cache: what happens to the KV cache of running requests at an update.
        is_late: it joined during the run: if its model differs, only it is refused and the run continues.
    """

    def __init__(
        self,
        address: ServerAddress,
        client: ControlClient,
        make_sender: Callable[[], Sender],
        timeout_s: float,
        kv_cache: KVCache,
        is_late: bool = False,
    ) -> None:
        self.address = address
        self.is_late = is_late
        self.client = client
        #: Why the last attempt failed; None if it did not.
        self.error: str | None = None
        #: What the server says of its model, once it is connected.
        self.model = ServerModel()
        #: Set when the server is known to be gone, so that no second attempt is made.
        self.gone: str | None = None
        self._make_sender = make_sender
        self._timeout_s = timeout_s
        self._kv_cache: KVCache = kv_cache
        self._sender: Sender | None = None
        self._phase = "connect"
        self._buffers: queue.Queue[torch.Tensor | None] = queue.Queue(_QUEUED_BUFFERS)
        self._took_buffer_at = time.monotonic()
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
            await self.client.worker_call("pipelinerl_abort_update")
            self.model = msgspec.convert(await self.client.worker_call("pipelinerl_model_info"), ServerModel)
            if self.model.rounded:
                text = (
                    "%s rounds %d tensors, such as %s, to fewer bits than %s has: its policy differs from the trainer's"
                )
                logger.warning(text, self.name, len(self.model.rounded), self.model.rounded[0], self.model.dtype)
            self._sender = sender = self._make_sender()
            details = sender.prepare(int((await self.client.get("/get_world_size"))["world_size"]))
            joining = self.client.post("/init_weight_transfer_engine", json={"init_info": {"details": details}})
            await _together(joining, _in_thread(f"weights-join-{self.name}", sender.join))
            self.error = None

    async def update(self, version: int, update_info: dict[str, Any]) -> ServerUpdate:
        """One update: pause, transfer, load, resume. The buffers come through `feed`.

        Args:
            version: label of the new weights.
            update_info: what the buffers contain (`buffers.update_info_of`).

        Raises:
            WeightSyncError: with the quoted error. The server stays paused: resuming it with half-loaded weights would
                kill its engine.
        """
        body = {
            "update_info": update_info,
            "weight_version": weight_label(version),
            "kv_cache": self._kv_cache,
            # A server that sleeps resumes by itself when its KV cache is back.
            "resumes": not self._asleep,
        }
        async with self._attempt("update"):
            waking_s = await self._wake_up("weights")
            sending = _in_thread(f"weights-send-{self.name}", self._send_buffers)
            answer, _ = await _together(self.client.post(UPDATE_PATH, json=body), sending)
            seconds: dict[str, float] = answer["seconds"]
            seconds["pause"] += waking_s
            seconds["resume"] += await self._wake_up("kv_cache")
            self._asleep = False
        return ServerUpdate(self.name, seconds)

    async def sleep(self, level: int) -> None:
        """Let the server leave its GPU until the next update. No request may run.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them, 0 only pauses.

        Raises:
            WeightSyncError: it did not answer in time, or its answer is quoted.
        """
        async with self._attempt("sleep"):
            if level == 0:
                await self.client.pause()
            else:
                await self.client.post("/sleep", params={"level": str(level), "mode": "keep"})
            self._asleep = level > 0

    def begin_round(self) -> None:
        """Forget the buffers of an earlier attempt. Call before `feed` and `update`."""
        self._buffers = queue.Queue(_QUEUED_BUFFERS)
        self._took_buffer_at = time.monotonic()

    def feed(self, buffer: torch.Tensor | None) -> None:
        """Hand the next buffer (None: there are no more) to this server. Called from the trainer's thread."""
        limit_s = _STALL_SHARE * self._timeout_s
        if self._buffers.empty():
            # The server waited for the trainer, not the other way around.
            self._took_buffer_at = time.monotonic()
        while self.error is None:
            # Counted from the last buffer that it took: two servers that hang use up the same time, not twice as much.
            left_s = self._took_buffer_at + limit_s - time.monotonic()
            try:
                # In short waits, because the link may fail meanwhile and then nobody empties the queue.
                self._buffers.put(buffer, timeout=min(1.0, max(0.0, left_s)))
                return
            except queue.Full:
                if time.monotonic() >= self._took_buffer_at + limit_s:
                    self.error = f"phase {self._phase}: no buffer was taken for {limit_s:g} s"

    def abandon(self, reason: str) -> None:
        """The server is gone: make everything that waits for it fail now. Any thread may call it."""
        self.gone = reason
        self._fail(reason)

    def close(self) -> None:
        """Leave the transfer group; the server keeps running."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _send_buffers(self) -> None:
        sender, buffers = self._sender, self._buffers
        if sender is None:
            raise RuntimeError("the transfer group is not connected")
        while (buffer := buffers.get(timeout=self._timeout_s)) is not None:
            self._took_buffer_at = time.monotonic()
            sender.send(buffer)

    @asynccontextmanager
    async def _attempt(self, phase: str) -> AsyncIterator[None]:
        """One attempt with a deadline. Whatever goes wrong closes the group and becomes a `WeightSyncError`."""
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
            # Half an update may be on its way; its worker must not wait for the rest.
            self.close()
            raise

    def _fail(self, message: str) -> None:
        self.error = message
        # Frees a worker that waits in a broadcast: its peer is gone, so its call fails now.
        self.close()

    async def _wake_up(self, tags: str) -> float:
        """Give a sleeping server this part of its memory back; returns the seconds that it took."""
        started = time.monotonic()
        if self._asleep:
            await self.client.post("/wake_up", params={"tags": tags})
        return time.monotonic() - started


async def _together(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await all calls and return their results; an error cancels the others and is raised as it is, not in a group.

    If several failed at once, what a server said is raised: the failures of threads are its consequences.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        told = (error for error in errors.exceptions if isinstance(error, WeightSyncError))
        first = next(told, errors.exceptions[0])
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def _in_thread(name: str, call: Callable[[], object]) -> None:
    """Run a blocking `call` in a daemon thread. After a cancellation it continues and its outcome is dropped.

    Not `asyncio.to_thread`: a pool joins its threads when the interpreter exits, and one may be stuck in NCCL.
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting task
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    await asyncio.wrap_future(done)
