"""Pauses generation for training and updates, for every schedule but `pipeline`.

| schedule, placement       | before training a round                     | before an update               |
|---------------------------|---------------------------------------------|--------------------------------|
| concurrent, conventional  |                                             | running rollouts end           |
| conventional, colocated   | rollouts and evaluations end, servers sleep | optimizer state leaves the GPU |

Rank 0 asks the actor on the stream `turns` and waits for its answer, at most `timeout_s`; the other ranks wait for rank
0. The actor needs nothing from the trainer to finish its rollouts, so this cannot deadlock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import torch

from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import next_update, pauses_rollouts
from pipelinerl.errors import WorkerError
from pipelinerl.finetune.backends.base import Backend, PlainBackend
from pipelinerl.finetune.data_feed import StopRequest
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import PauseRequest, RolloutsPaused, record_time
from pipelinerl.role import RoleContext
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.streams.base import TURNS_TOPIC, StreamReader, StreamWriter
from pipelinerl.weights.link import ControlClient, control_session
from pipelinerl.weights.sync import WeightPublisher

_ACTOR = "actor_0"
#: Share of the free host memory that copies of the servers' weights may occupy.
_MAX_HOST_SHARE = 0.5


@dataclass
class RolloutPause:
    """Rank 0's request to let running rollouts finish.

    Attributes:
        timeout_s: longest wait; rollouts have a shorter time-out.
        should_stop: checked before the wait and after every wake-up.
    """

    requests: StreamWriter[PauseRequest]
    answers: StreamReader[RolloutsPaused]
    incarnation: int
    heartbeat: Heartbeat
    timeout_s: float
    should_stop: Callable[[], bool] = lambda: False

    def wait(self, version: int) -> bool:
        """Return True once no rollout is running or starts before `version` is served; False if asked to stop.

        Raises:
            WorkerError: rollouts still run after `timeout_s`.
        """
        self.requests.write(PauseRequest(version=version, time=record_time(), incarnation=self.incarnation))
        self.requests.flush()
        deadline = time.monotonic() + self.timeout_s
        with self.heartbeat.waiting("running rollouts to end", deadline_s=self.timeout_s):
            while not self.should_stop():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WorkerError(
                        f"rollouts still ran {self.timeout_s:g} s after the trainer asked for the update to version "
                        f"{version} (actor.rollout_timeout_s): the actor made no progress"
                    )
                for entry in self.answers.read(left_s):
                    answer = entry.record
                    if answer.incarnation == self.incarnation and answer.version >= version:
                        return True
        return False

    def wake(self) -> None:
        """Make a running `wait` check `should_stop` again. Thread-safe."""
        self.answers.wake()


class Pauses:
    """What every rank does around updates: nothing, as for `schedule=pipeline`.

    Args:
        pause: None on all ranks but the first, and if the run has none.
    """

    def __init__(self, pause: RolloutPause | None, ranks: Ranks) -> None:
        self._pause = pause
        self._ranks = ranks

    def before_training(self, steps_done: int) -> bool:
        """Wait until the next step may be trained; False if the trainer was asked to stop meanwhile."""
        return True

    def before_update(self, version: int) -> bool:
        """Wait until the servers may get `version`; False if the trainer was asked to stop meanwhile."""
        return True

    def wake(self) -> None:
        if self._pause is not None:
            self._pause.wake()

    def _wait(self, version: int) -> bool:
        return bool(self._ranks.broadcast(int(self._pause is None or self._pause.wait(version))))


class PausedUpdates(Pauses):
    """Rollouts end before each update."""

    def before_update(self, version: int) -> bool:
        return self._wait(version)


class SharedDevices(Pauses):
    """Servers and trainer alternate on the same devices: servers sleep from the pause to the next update.

    Args:
        publisher: controls the servers; None on all ranks but the first.
    """

    def __init__(
        self,
        config: RunConfig,
        pause: RolloutPause | None,
        ranks: Ranks,
        backend: Backend,
        publisher: WeightPublisher | None,
    ) -> None:
        super().__init__(pause, ranks)
        self._config = config
        self._backend = backend
        self._publisher = publisher
        self._is_gpu = ranks.device.type == "cuda"
        self._is_training = False

    def before_training(self, steps_done: int) -> bool:
        if self._is_training:
            return True
        if not self._wait(next_update(self._config, steps_done)):
            return False
        if self._publisher is not None:
            self._publisher.sleep(self._sleep_level(len(self._publisher.servers)) if self._is_gpu else 0)
        # No rank allocates before the servers have freed their memory.
        self._ranks.broadcast(1)
        if self._is_gpu:
            torch.cuda.ipc_collect()
        self._move_optimizer(self._ranks.device)
        self._is_training = True
        return True

    def before_update(self, version: int) -> bool:
        if self._is_training:
            self._move_optimizer(torch.device("cpu"))
            if self._is_gpu:
                # The servers need the memory of the allocator's cache.
                torch.cuda.empty_cache()
            # Rank 0 wakes the servers of all GPUs, including those of slower ranks.
            self._ranks.barrier()
            self._is_training = False
        return True

    def _sleep_level(self, num_servers: int) -> int:
        metas = self._backend.weight_source(self._backend.policy.served_dtype).metadata()
        weight_bytes = num_servers * sum(meta.num_bytes for meta in metas)
        choice = self._config.world.colocated.sleep_level if self._config.world.colocated else "auto"
        return sleep_level(choice, weight_bytes, psutil.virtual_memory().available)

    def _move_optimizer(self, device: torch.device) -> None:
        colocated = self._config.world.colocated
        if self._is_gpu and colocated and colocated.offload_optimizer and isinstance(self._backend, PlainBackend):
            self._backend.move_optimizer(device)


def sleep_level(choice: str, weight_bytes: int, available_bytes: int) -> int:
    """vLLM's level of sleep: 1 keeps a copy of the weights in host memory, 2 drops them.

    Args:
        choice: `world.sleep_level`; `auto` is 1 if the copies fit, because only level 1 restores what a model holds in
            addition to the checkpoint's tensors.
        weight_bytes: of all servers on this machine.
        available_bytes: free memory of this machine.
    """
    if choice != "auto":
        return int(choice)
    return 1 if weight_bytes <= _MAX_HOST_SHARE * available_bytes else 2


def open_pauses(
    context: RoleContext,
    ranks: Ranks,
    backend: Backend,
    publisher: WeightPublisher | None,
    stop: StopRequest,
    stack: ExitStack,
) -> Pauses:
    """What this rank does around updates. `stack` closes the streams."""
    config = context.config
    if not pauses_rollouts(config):
        return Pauses(None, ranks)
    pause = None
    if ranks.is_first:
        requests = context.streams.writer(TURNS_TOPIC, context.job.name, PauseRequest)
        answers = context.streams.reader(TURNS_TOPIC, _ACTOR, RolloutsPaused)
        stack.callback(requests.close)
        stack.callback(answers.close)
        timeout_s = config.actor.rollout_timeout_s + config.supervise.weight_sync_timeout_s
        if config.world.placement == "colocated":
            # The wait includes a running evaluation.
            timeout_s = max(timeout_s, config.supervise.progress_timeout_s)
        pause = RolloutPause(
            requests, answers, context.incarnation, context.heartbeat, timeout_s, should_stop=lambda: stop.requested
        )
    if config.world.placement == "colocated":
        return SharedDevices(config, pause, ranks, backend, publisher)
    return PausedUpdates(pause, ranks)


def wait_for_servers(context: RoleContext) -> None:
    """Return when all servers are up: as they start they measure GPU memory, and fail if it changes meanwhile.

    Raises:
        WeightSyncError: a server did not come up in time.
    """
    timeout_s = context.config.vllm_config.start_timeout_s

    async def wait() -> None:
        async with control_session(context.token) as session:
            for job in context.world.jobs_of("actor_llm"):
                await ControlClient(session, job.name, str(job.url)).wait_healthy(timeout_s)

    with context.heartbeat.waiting("servers to start", deadline_s=timeout_s):
        asyncio.run(wait())
