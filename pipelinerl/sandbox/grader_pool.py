"""A fixed number of grader processes with deadlines that hold; a process that misses one is killed and replaced.

Used by the verifier service and, without one, by each rollout worker. Grading waits for a free process, then for the
answer. The event loop itself never grades.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from pipelinerl.sandbox.children import Child, start_child
from pipelinerl.sandbox.messages import (
    Grade,
    GradeAnswer,
    GradeFailed,
    GradeRequest,
    Load,
    Loaded,
    clean_text,
    frame,
    read_payload,
)

LOAD_TIMEOUT_S = 120.0
_KILL_GRACE_S = 0.5
# Failures that leave the process as it was.
_HARMLESS = ("grader_raised", "grader_bad_result")
_decode = msgspec.msgpack.Decoder(Grade | GradeFailed | Loaded).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(eq=False)
class _Process:
    child: Child
    loaded: set[str] = field(default_factory=set)
    num_graded: int = 0


class GraderPool:
    """At most `size` grader processes, started when they are first needed. Use as an async context manager.

    Args:
        size: processes, and so answers that are graded at the same time; further ones queue.
        timeout_s: deadline of one grading, where the request names none.
        memory_bytes: address space of a process.
        max_uses: gradings after which a process is replaced, so that what a library hoards does not grow for ever.
    """

    def __init__(self, size: int, timeout_s: float, memory_bytes: int, max_uses: int = 5000) -> None:
        self._places = asyncio.Semaphore(size)
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._max_uses = max_uses
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self.waiting = 0
        self.seconds = 0.0
        self.outcomes: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def num_processes(self) -> int:
        return len(self._all)

    async def grade(self, request: GradeRequest) -> GradeAnswer:
        """Grade one answer. Always returns: the deadline starts when a process takes the request."""
        self.waiting += 1
        try:
            async with self._places:
                answer = await self._grade_now(request)
        finally:
            self.waiting -= 1
        self.outcomes[answer.reason if isinstance(answer, GradeFailed) else answer.status] += 1
        return answer

    async def close(self) -> None:
        """Kill all processes."""
        for process in list(self._all):
            await self._end(process)

    async def _grade_now(self, request: GradeRequest) -> GradeAnswer:
        started = time.monotonic()
        timeout_s = request.timeout_s or self._timeout_s
        try:
            payload = _encode(msgspec.structs.replace(request, text=clean_text(request.text), timeout_s=timeout_s))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return GradeFailed("grader_bad_request", f"problem or params cannot be sent to a grader: {error}")
        process = await self._take(request.grader)
        is_usable = False
        try:
            answer: GradeAnswer = await self._load(process, request.grader) or await self._ask(
                process, payload, timeout_s + _KILL_GRACE_S, request.grader
            )
            # An interrupted grader may have left a library in any state.
            is_usable = isinstance(answer, Grade) or answer.transient or answer.reason in _HARMLESS
        finally:
            process.num_graded += 1
            if is_usable and process.num_graded < self._max_uses:
                self._idle.append(process)
            else:
                await self._end(process)
            self.seconds += time.monotonic() - started
        return answer

    async def _take(self, grader: str) -> _Process:
        """Return an idle process, if possible one that knows the grader, or a new one."""
        for process in reversed(self._idle):
            if grader in process.loaded:
                self._idle.remove(process)
                return process
        return self._idle.pop() if self._idle else await self._start()

    async def _load(self, process: _Process, grader: str) -> GradeFailed | None:
        if grader in process.loaded:
            return None
        answer = await self._exchange(process, _encode(Load(grader)), LOAD_TIMEOUT_S, f"importing {grader}")
        if isinstance(answer, Loaded):
            process.loaded.add(grader)
            return None
        return answer if isinstance(answer, GradeFailed) else GradeFailed("grader_bad_result", "no grader was loaded")

    async def _ask(self, process: _Process, payload: bytes, timeout_s: float, what: str) -> GradeAnswer:
        answer = await self._exchange(process, payload, timeout_s, what)
        return answer if not isinstance(answer, Loaded) else GradeFailed("grader_bad_result", "an answer out of turn")

    async def _exchange(
        self, process: _Process, payload: bytes, timeout_s: float, what: str
    ) -> Grade | GradeFailed | Loaded:
        try:
            async with asyncio.timeout(timeout_s):
                process.child.writer.write(frame(payload))
                answer = await read_payload(process.child.reader)
        except TimeoutError:
            return GradeFailed("grader_timeout", f"{what} took more than {timeout_s:g} s and was killed")
        except ConnectionError:
            answer = None
        if answer is None:
            return GradeFailed("grader_died", f"{what}: its process ended")
        try:
            return _decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return GradeFailed("grader_bad_result", f"{what}: not a grade: {error}")

    async def _start(self) -> _Process:
        process = _Process(await start_child("pipelinerl.sandbox.grader_process", self._memory_bytes))
        self._all.add(process)
        return process

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        await process.child.end()
