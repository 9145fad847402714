"""Calls to all workers of a server of which some fail: every worker's answer is read, whichever failed.

vLLM's executor for several worker processes stops reading at the first failed answer. Those of the workers behind it
stay in their queues, and from then on each of these workers answers every call with the answer to the call before:
after one failed update no further one succeeds. Here a failure comes back as a value, and is raised when all answered.
Called by `inference.scheduler` in the engine's process. Waits for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

# Below the name of vLLM, whose configuration of logging is the one that these processes have.
logger = init_logger(f"vllm.{__name__}")
_MARK = "pipelinerl_reads_every_answer"


def read_every_answer(executor_class: Any) -> None:
    """Change `collective_rpc` of vLLM's executor class; a second call changes nothing.

    Calls that do not wait, and those that one worker answers, are those of the running model: their failure ends the
    engine. They stay as they are, and so do calls of functions and calls with a time-out.
    """
    call_all = executor_class.collective_rpc
    if getattr(call_all, _MARK, False):
        return

    @functools.wraps(call_all)
    def collective_rpc(
        self: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **others: Any,
    ) -> Any:
        special = non_block or unique_reply_rank is not None or any(value is not None for value in others.values())
        # Functions travel in a way of their own, and a time-out of vLLM's stops reading as well.
        if special or timeout is not None or not isinstance(method, str):
            return call_all(self, method, timeout, args, kwargs, non_block, unique_reply_rank, **others)
        return values_of(call_all(self, guarded, None, (method, args, kwargs or {})))

    setattr(collective_rpc, _MARK, True)
    executor_class.collective_rpc = collective_rpc


def guarded(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """What a worker does when it is called: whether that went well, and its result or what was raised, as text."""
    try:
        return True, getattr(worker, method)(*args, **kwargs)
    except Exception as error:
        logger.exception("%s failed", method)
        return False, str(error) or type(error).__name__


def values_of(answers: Sequence[tuple[bool, Any]]) -> list[Any]:
    """The results of all workers in the order of their ranks.

    Raises:
        RuntimeError: at least one failed; with every different error (one may be the consequence of another), in vLLM's
            words.
    """
    failures = [(rank, value) for rank, (is_well, value) in enumerate(answers) if not is_well]
    if failures:
        ranks: dict[Any, list[str]] = {}
        for rank, error in failures:
            ranks.setdefault(error, []).append(str(rank))
        if len(answers) == 1:
            what = f"'{failures[0][1]}'"
        else:
            what = "; ".join(f"'{error}' (worker {', '.join(those)})" for error, those in ranks.items())
            what += f"; {len(failures)} of {len(answers)} workers failed"
        raise RuntimeError(f"Worker failed with error {what}, please check the stack trace above for the root cause")
    return [value for _, value in answers]
