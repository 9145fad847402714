"""What actor and rollout workers say to each other, and how: msgpack frames behind a length of four bytes.

Used by both ends of a socket pair. `FrameReader` waits for the other end; plain data only, so that neither end can make
the other one run anything.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import msgspec

from pipelinerl.errors import RolloutError
from pipelinerl.records import EvaluationSample, RolloutSummary, Sample

logger = logging.getLogger(__name__)

# Exit codes of a worker. faulthandler leaves with 1 when the event loop stood still for too long.
BLOCKED_EXIT_CODE = 1
CRASHED_EXIT_CODE = 3
#: Makes a worker write the stacks of its threads to its stderr and end.
STACKS_SIGNAL = signal.SIGUSR1
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 31
_READ_BYTES = 1 << 20


class Servers(msgspec.Struct, tag="servers"):
    """To a worker, before the first rollout and whenever a server joined: the longest sequence of each server, in
    tokens (None: unknown). `urls` are those of all servers, the ones of the plan first; empty: those of the plan."""

    max_model_lens: list[int | None]
    urls: list[str] = []


class StartRollout(msgspec.Struct, tag="start"):
    """To a worker. `ticket` names this attempt in all answers; `server` is the index of the server to use; `record`
    asks for the tokens of an evaluation."""

    ticket: int
    rollout_id: str
    group_id: str
    server: int
    evaluation: bool
    seed: int
    problem: dict[str, Any]
    record: bool = False


class CancelRollout(msgspec.Struct, tag="cancel"):
    ticket: int


class Ready(msgspec.Struct, tag="ready"):
    """From a worker, once: user code is imported and the tokenizer is loaded."""

    pid: int


class RolloutEnded(msgspec.Struct, tag="ended"):
    """From a worker: a rollout came to its end. Evaluations leave `samples` empty; `recorded` are their tokens, if they
    were asked for. Versions are those of the tokens."""

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
    """From a worker: a rollout failed; `transient` means that another server may do better."""

    ticket: int
    reason: str
    message: str
    transient: bool = False
    requests: int = 0
    retries: int = 0


class Fatal(msgspec.Struct, tag="fatal"):
    """From a worker: the run cannot go on. `user_error` asks for exit code 2 and no traceback."""

    user_error: bool
    message: str


ToWorker = Servers | StartRollout | CancelRollout
FromWorker = Ready | RolloutEnded | RolloutFailed | Fatal

_encoder = msgspec.msgpack.Encoder()
_ended_decoder = msgspec.msgpack.Decoder(RolloutEnded)


def sendable(answer: RolloutEnded) -> RolloutEnded:
    """`answer`, of which user code made many values, as the actor can read it: without what is recorded of it for
    people, if that is all that cannot be written.

    Raises:
        RolloutError: `bad_value`: another value is not of its type, or has no encoding.
    """
    try:
        _check_sendable(answer)
        return answer
    except RolloutError as error:
        if not answer.recorded:
            raise
        bare = msgspec.structs.replace(answer, recorded=[])
        _check_sendable(bare)
        logger.warning("what rollout %s said is not recorded: %s", answer.summary.rollout_id, error)
        return bare


def _check_sendable(answer: RolloutEnded) -> None:
    try:
        _ended_decoder.decode(_encoder.encode(answer))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise RolloutError(
            "bad_value", f"the rollout's result holds a value that cannot be recorded: {error}"
        ) from error


def write_frame(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Queue one message. What is in flight is bounded by the scheduler, so the buffer is too."""
    payload = _encoder.encode(message)
    writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)


class FrameWriter:
    """Writes messages; those of one turn of the event loop go out together."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: list[bytes] = []

    def write(self, message: msgspec.Struct) -> None:
        """Queue one message. What is in flight is bounded by the scheduler, so the buffer is too."""
        payload = _encoder.encode(message)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += (len(payload).to_bytes(_LENGTH_BYTES, "big"), payload)

    def close(self) -> None:
        """Send what is queued, and close."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write(b"".join(self._waiting))
            self._waiting = []


class FrameReader:
    """Reads messages from `reader`, as many at once as are there.

    Args:
        reader: of the socket pair.
        decoder: of the kinds of messages that may come.
    """

    def __init__(self, reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._reader = reader
        self._decode = decoder.decode
        self._data = bytearray()

    async def read(self) -> list[Any] | None:
        """Wait for at least one message; None when the other end is gone (also in the middle of a message).

        Raises:
            ValueError: the length is impossible.
            msgspec.MsgspecError: the content is not a known message.
        """
        while True:
            messages = self._whole_messages()
            if messages:
                return messages
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._data += data

    def _whole_messages(self) -> list[Any]:
        start = 0
        messages = []
        with memoryview(self._data) as data:
            while len(data) - start >= _LENGTH_BYTES:
                length = int.from_bytes(data[start : start + _LENGTH_BYTES], "big")
                if length > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes, expected at most {_MAX_FRAME_BYTES}")
                end = start + _LENGTH_BYTES + length
                if end > len(data):
                    break
                with data[start + _LENGTH_BYTES : end] as content:
                    messages.append(self._decode(content))
                start = end
        del self._data[:start]
        return messages
