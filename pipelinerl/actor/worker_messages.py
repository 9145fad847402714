"""Messages between the actor and its rollout workers (processes that run user code), and their connection.

Messages are length-prefixed msgpack over a socket pair that the worker inherits.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Generic, TypeVar

import msgspec

from pipelinerl.errors import RolloutError
from pipelinerl.records import EvaluationSample, RolloutSummary, Sample

#: Exit codes of a worker. faulthandler exits with 1 when user code blocked the event loop for too long.
BLOCKED_EXIT_CODE = 1
CRASHED_EXIT_CODE = 3
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 1 << 31
# New objects before the collector looks at them (Python: 700), and passes before it looks at older ones (10, 10).
_GC_THRESHOLDS = (20_000, 20, 20)


class Servers(msgspec.Struct, tag="servers"):
    """To a worker, before the first rollout and whenever a server joined: all servers, in the scheduler's order.

    `max_model_len` is the longest sequence in tokens (None: unknown).
    """

    urls: list[str]
    max_model_len: int | None


class StartRollout(msgspec.Struct, tag="start"):
    """One rollout to run; to a worker. `record` asks for the tokens of an evaluation.

    `evaluation_set` selects the sampling of an evaluation (`RunConfig.evaluation_parameters`). `server` and `ticket`,
    which identifies a try in all answers, are set for each try.
    """

    rollout_id: str
    group_id: str
    problem: dict[str, Any]
    seed: int
    evaluation: bool = False
    evaluation_set: int = 0
    record: bool = False
    server: int = 0
    ticket: int = 0


class CancelRollout(msgspec.Struct, tag="cancel"):
    """To a worker, which answers with `RolloutFailed`."""

    ticket: int


class Ready(msgspec.Struct, tag="ready"):
    """From a worker, once: user code is imported and the tokenizer is loaded."""

    pid: int


class RolloutEnded(msgspec.Struct, tag="ended"):
    """From a worker: a rollout ended. `samples` is empty for evaluations, and `recorded` are their tokens on request.

    `min_version` and `max_version` are those that sampled its tokens.
    """

    ticket: int
    samples: list[Sample]
    summary: RolloutSummary
    dataset_name: str | None
    min_version: int | None
    max_version: int | None
    requests: int
    retries: int
    recorded: list[EvaluationSample] = []


class RolloutFailed(msgspec.Struct, tag="failed"):
    """From a worker: a rollout failed. `transient`: another try may succeed."""

    ticket: int
    reason: str
    message: str
    transient: bool = False
    requests: int = 0
    retries: int = 0


class Fatal(msgspec.Struct, tag="fatal"):
    """From a worker: the run must end. `user_error` asks for exit code 2 and no traceback."""

    user_error: bool
    message: str


Answer = RolloutEnded | RolloutFailed
ToWorker = Servers | StartRollout | CancelRollout
FromWorker = Ready | RolloutEnded | RolloutFailed | Fatal
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_ended_decoder = msgspec.msgpack.Decoder(RolloutEnded)


class Connection(Generic[T]):
    """One end of the socket pair. Messages are few (bounded by the slots), so writes are not awaited.

    Args:
        received: union of the messages that the other end sends.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(received)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message. What is for an end that is gone is dropped: `receive` says that it is gone."""
        payload = _encoder.encode(message)
        # uvloop raises where asyncio drops it.
        if not self._writer.is_closing():
            self._writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)

    async def flush(self) -> None:
        """Wait until most queued messages have been sent."""
        await self._writer.drain()

    async def receive(self) -> T | None:
        """Wait for the next message; None once the other end is gone, even in the middle of a message.

        Raises:
            ValueError: impossible length.
            msgspec.MsgspecError: not a known message.
        """
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"message length: got {length} bytes, expected at most {_MAX_MESSAGE_BYTES}")
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        message: T = self._decoder.decode(payload)
        return message

    def close(self) -> None:
        """Send what is queued and close."""
        self._writer.close()


def rest_collector() -> None:
    """Make Python's garbage collector run rarely, and only over new objects.

    Rollouts make many small objects without cycles; with default thresholds collection takes a fifth of the CPU time of
    a short rollout.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def check_sendable(answer: RolloutEnded) -> None:
    """Check that the actor can read `answer`, whose values come from user code.

    Raises:
        RolloutError: `bad_value`: a value has the wrong type or cannot be encoded.
    """
    try:
        _ended_decoder.decode(_encoder.encode(answer))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise RolloutError("bad_value", f"the rollout's result has a value that cannot be recorded: {error}") from error
