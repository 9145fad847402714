"""vLLM's scheduler with requests that start several at once. Base of both of our schedulers (`inference.scheduler`).

Only requests of the queue `waiting` are held back, for a few steps and only while others run: one that has memory
already, or is in the middle of its prompt, goes on. `inference.admission` decides; a paused scheduler is left alone.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from pipelinerl.inference.admission import batcher_from

# Below the name of vLLM, whose configuration of logging is the one that this process has.
logger = logging.getLogger(f"vllm.{__name__}")


class BatchedStartScheduler(Scheduler):
    """As vLLM's own, unless the environment asks for more (see `admission.batcher_from`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batcher = batcher_from(os.environ)
        if self._batcher is not None:
            logger.info("requests start several at once, after %d steps at the latest", self._batcher.wait_steps)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._batcher is None or self._pause_state != PauseState.UNPAUSED:
            return super().schedule(throttle_prefills)
        if self._batcher.holds(len(self.running), self._ready()) and self._would_only_decode():
            output = self._schedule_running(throttle_prefills)
            self._batcher.held()
            return output
        waiting = len(self.waiting)
        output = super().schedule(throttle_prefills)
        self._batcher.offered(max(0, waiting - len(self.waiting)), self._ready(), cut_short=self._is_full(output))
        return output

    def _schedule_running(self, throttle_prefills: bool) -> SchedulerOutput:
        """A step without new requests: as during a pause that lets the running ones end, but nobody sees a pause."""
        capacity_bound = self.prefill_capacity_bound
        # Not by `set_pause_state`: that writes to the log, and its end would be taken for a change of the weights.
        self._pause_state = PauseState.PAUSED_NEW
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = PauseState.UNPAUSED
            # vLLM's flag for data parallelism; requests that were held back say nothing about what there is room for.
            self.prefill_capacity_bound = capacity_bound

    def _ready(self) -> int:
        """Requests that wait, at most as many as there are free places for."""
        taken = len(self.running) + self.num_waiting_for_streaming_input
        return max(0, min(len(self.waiting), self.max_num_active_reqs - taken))

    def _would_only_decode(self) -> bool:
        """Whether the coming step has something to compute without new requests, and no part of a prompt.

        If not, to hold them back would leave the GPU idle, or spare no slow step.
        """
        return any(map(self._takes_part, self.running)) and not any(each.is_prefill_chunk for each in self.running)

    def _takes_part(self, request: Request) -> bool:
        """Whether a running request has something to compute in the coming step.

        While other steps are in flight it may have not: its last token is being sampled, or its turn in a pipeline of
        several stages comes later. The conditions are those of vLLM's `schedule`.
        """
        sampling = request.num_output_placeholders
        last = request.num_prompt_tokens + request.max_tokens
        if sampling > 0 and request.num_computed_tokens + 2 - sampling >= last:
            return False
        tokens = request.num_tokens_with_spec + sampling - request.num_computed_tokens
        room = self.max_model_len - request.num_computed_tokens - self.num_sampled_tokens_per_step
        return self.current_step + 1 >= request.next_decode_eligible_step and min(tokens, room) > 0

    def _is_full(self, output: SchedulerOutput) -> bool:
        """Whether the next request that waits wants more tokens than the step had left."""
        left = self.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        return bool(self.waiting) and self.waiting.peek_request().num_tokens > left
