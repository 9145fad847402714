"""vLLM's scheduler with prefix-cache entries that never cross a change of weights.

Cache entries are found by a hash of the tokens and a salt. The salt is set here, when a request is about to be
scheduled, and names the epoch of the weights: a request that was queued before an update and starts after it gets the
new epoch, so it cannot hit blocks of the old weights. The epoch counts resumes (weights change only while the
scheduler is paused), so a version number that is used twice does no harm.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from pipelinerl.inference.cache_salt import salt_for_epoch


class EpochSaltMixin:
    """Salts requests when they are queued, and again if the weights may have changed before they were scheduled."""

    _weights_epoch: int = 0

    def add_request(self, request: Request) -> None:
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
    """For engines with asynchronous scheduling."""


def create_scheduler(**kwargs: Any) -> Scheduler:
    """What vLLM calls as `--scheduler-cls`: the class depends on the engine's mode, as in vLLM itself."""
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (EpochAsyncScheduler if is_async else EpochScheduler)(**kwargs)
