"""vLLM's scheduler, in the engine's process, with prefix-cache entries that never cross a change of weights.

Cache entries are found by a hash of the tokens and a salt. The salt is set here, when a request is about to be
scheduled, and names the epoch of the weights: a request that was queued before an update and starts after it gets the
new epoch, so it cannot hit blocks of the old weights. The epoch counts resumes (weights change only while the
scheduler is paused), so a version number that is used twice does no harm.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from pipelinerl.inference.adapter import adapter_request
from pipelinerl.inference.arguments import serves_adapter
from pipelinerl.inference.engine_update import install
from pipelinerl.inference.fast_output import DEFAULT_HELD_TOKENS, HELD_TOKENS_VARIABLE, OutputHold, cheap_to_cut

# Below the name of vLLM, whose configuration of logging is the one that the engine's processes have.
logger = init_logger(f"vllm.{__name__}")
_EPOCH = re.compile(r"^weights-epoch-\d+:")
_MARK = "pipelinerl_reads_every_answer"


def salt_for_epoch(salt: str | None, epoch: int) -> str:
    """`salt` with the epoch of the weights put in front, in place of an earlier epoch."""
    own = _EPOCH.sub("", salt or "", count=1)
    return f"weights-epoch-{epoch}:{own}"


class EpochSaltMixin:
    """Salts requests when they are queued, and again if the weights may have changed before they were scheduled."""

    #: What every request uses where the base model is frozen (see `inference.adapter`).
    adapter: Any = None
    _weights_epoch: int = 0

    def add_request(self, request: Request) -> None:
        if self.adapter is not None:
            request.lora_request = self.adapter
        self._salt(request)
        super().add_request(request)  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        # Its blocks are gone and it starts over; what it finds now must be of today's weights.
        self._salt(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        was_paused = self.pause_state != PauseState.UNPAUSED  # type: ignore[attr-defined]
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if was_paused and pause_state == PauseState.UNPAUSED:
            self._weights_epoch += 1
            for request in self.waiting:  # type: ignore[attr-defined]
                if request.num_computed_tokens == 0:
                    self._salt(request)

    def _salt(self, request: Request) -> None:
        """Give the request the salt of the current epoch and hash its tokens anew."""
        request.cache_salt = salt_for_epoch(request.cache_salt, self._weights_epoch)
        if request.block_hashes:
            request.block_hashes.clear()
            request.update_block_hashes()


class EpochScheduler(EpochSaltMixin, Scheduler):
    """For engines without asynchronous scheduling."""


class EpochAsyncScheduler(EpochSaltMixin, AsyncScheduler):
    """For engines with asynchronous scheduling. Tokens leave in batches (see `fast_output`).

    While requests run, a step is always in flight, so a pause ends only after one more call of `update_from_output`:
    there everything that is held goes out, under the label of the weights that sampled it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        held_tokens = int(os.environ.get(HELD_TOKENS_VARIABLE, DEFAULT_HELD_TOKENS))
        self._hold = OutputHold(held_tokens) if held_tokens > 1 else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._hold is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = cheap_to_cut(model_runner_output.logprobs)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            batch.outputs = self._hold.pass_on(batch.outputs, self.requests)
        if self.pause_state != PauseState.UNPAUSED:
            self._ship(outputs, self._hold.release())
        return outputs

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED and self._hold is not None and (late := self._hold.void_logprobs()):
            # The label of their weights is gone. Without log-probs they are refused as samples, not trained wrongly.
            logger.error("%d requests held tokens across a pause; their samples are discarded", late)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        ended = super().finish_requests(*args, **kwargs)
        if self._hold is not None:
            self._hold.forget(request.request_id for request in ended)
        return ended

    def _ship(self, outputs: dict[int, EngineCoreOutputs], released: list[EngineCoreOutput]) -> None:
        for output in released:
            request = self.requests.get(output.request_id)
            if request is not None:
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


def create_scheduler(**kwargs: Any) -> Scheduler:
    """What vLLM calls as `--scheduler-cls`: the class depends on the engine's mode, as in vLLM itself.

    It is also where code of ours runs in the engine's process before the first update.
    """
    read_every_answer(MultiprocExecutor)
    install()
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    scheduler = (EpochAsyncScheduler if is_async else EpochScheduler)(**kwargs)
    if serves_adapter(os.environ):
        scheduler.adapter = adapter_request()
    return scheduler


def read_every_answer(executor_class: Any) -> None:
    """Change `collective_rpc` of vLLM's executor class: every worker's answer is read, whichever failed.

    vLLM's executor for several worker processes stops reading at the first failed answer. Those of the later workers
    stay in their queues, and from then on each of these workers answers every call with the answer to the call before:
    after one failed update no further one succeeds. Here a failure comes back as a value, and is raised when all
    answered. A second call changes nothing.

    Calls that do not wait, and those that one worker answers, are those of the running model: their failure ends the
    engine. They stay as they are, and so do calls of functions and calls with a timeout.
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
        # Functions travel in a way of their own, and a timeout of vLLM's stops reading as well.
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
