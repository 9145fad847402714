"""vLLM's scheduler with prefix-cache entries that never cross a change of weights.

Cache entries are found by a hash of the tokens and a salt. The salt is set here, when a request is about to be
scheduled, and names the epoch of the weights: a request that was queued before an update and starts after it gets the
new epoch, so it cannot hit blocks of the old weights. The epoch counts resumes (weights change only while the
scheduler is paused), so a version number that is used twice does no harm.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from pipelinerl.inference.adapter_room import serves_adapter
from pipelinerl.inference.cache_salt import salt_for_epoch
from pipelinerl.inference.coalesce import DEFAULT_MAX_TOKENS, HELD_TOKENS_VARIABLE, OutputHold, cheap_to_cut
from pipelinerl.inference.executor import read_every_answer

logger = logging.getLogger(__name__)


class EpochSaltMixin:
    """Salts requests when they are queued, and again if the weights may have changed before they were scheduled."""

    #: What every request uses where the base model is frozen (see `inference.lora`).
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
    """For engines with asynchronous scheduling. Tokens leave in batches (see `inference.coalesce`).

    While requests run, a step is always in flight, so a pause ends only after one more call of `update_from_output`:
    there everything that is held goes out, under the label of the weights that sampled it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        held_tokens = int(os.environ.get(HELD_TOKENS_VARIABLE, DEFAULT_MAX_TOKENS))
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
            logger.error("%d requests held tokens over a pause; their samples are void", late)

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
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    scheduler = (EpochAsyncScheduler if is_async else EpochScheduler)(**kwargs)
    if serves_adapter(os.environ):
        from pipelinerl.inference.lora import adapter_request

        scheduler.adapter = adapter_request()
    return scheduler
