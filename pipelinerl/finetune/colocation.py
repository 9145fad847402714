"""Servers and trainer on the same devices: who leaves when, and what goes to host memory meanwhile.

Called by `assemble` with `world.placement=colocated`. On a GPU servers sleep (vLLM's sleep mode) while the trainer
trains; on a CPU they only pause. Weights come back with the next update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import torch

from pipelinerl.config import RunConfig
from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.role import RoleContext
from pipelinerl.schedules.drain import Drain
from pipelinerl.schedules.rounds import next_update
from pipelinerl.schedules.turns import SharedDevice
from pipelinerl.weights.control import ControlClient, control_session
from pipelinerl.weights.publisher import WeightPublisher

#: Of the host memory that is free, what copies of the servers' weights may take.
_LARGEST_HOST_PART = 0.5


def sleep_level(choice: str, weight_bytes: int, available_bytes: int) -> int:
    """vLLM's level of sleep: 1 keeps a copy of the weights in host memory, 2 drops them.

    Args:
        choice: `world.sleep_level`; `auto` is 1 where the copies fit, because only level 1 gives everything back that a
            model holds beside its checkpoint's tensors.
        weight_bytes: of all servers on this machine.
        available_bytes: of this machine's memory.
    """
    if choice != "auto":
        return int(choice)
    return 1 if weight_bytes <= _LARGEST_HOST_PART * available_bytes else 2


def wait_for_servers(context: RoleContext) -> None:
    """Return when all servers are up: they measure their GPU's memory at the start and fail if it changes meanwhile.

    Raises:
        WeightSyncError: one did not come up in time.
    """
    timeout_s = context.config.vllm_config.start_timeout_s

    async def wait() -> None:
        async with control_session(context.token) as session:
            for job in context.world.jobs_of("actor_llm"):
                try:
                    async with asyncio.timeout(timeout_s):
                        await ControlClient(session, job.name, str(job.url)).wait_healthy()
                except TimeoutError as error:
                    message = f"{job.url}/health did not answer within {timeout_s:g} s"
                    raise WeightSyncError(job.name, message) from error

    with context.heartbeat.waiting("servers to start", deadline_s=timeout_s):
        asyncio.run(wait())


def take_turns(
    context: RoleContext,
    ranks: Ranks,
    backend: Backend,
    drain: Drain | None,
    publisher: WeightPublisher | None,
    agree: Callable[[bool], bool],
) -> SharedDevice:
    """The turns of this rank; `drain` and `publisher` are rank 0's."""
    config = context.config
    is_gpu = ranks.device.type == "cuda"
    offloads = config.world.offload_optimizer and is_gpu

    def free_devices() -> None:
        if publisher is not None:
            publisher.sleep(level_of(config, backend, len(publisher.servers)) if is_gpu else 0)

    def move_optimizer(device: torch.device) -> None:
        if offloads and isinstance(backend, PlainBackend):
            backend.move_optimizer(device)

    def put_state_away() -> None:
        move_optimizer(torch.device("cpu"))
        if is_gpu:
            # What the allocator keeps for later is what the servers need now.
            torch.cuda.empty_cache()

    def take_state() -> None:
        if is_gpu:
            torch.cuda.ipc_collect()
        move_optimizer(ranks.device)

    return SharedDevice(
        drain,
        agree,
        next_update=lambda steps_done: next_update(config, steps_done),
        free_devices=free_devices,
        take_state=take_state,
        put_state_away=put_state_away,
        all_away=ranks.barrier,
    )


def level_of(config: RunConfig, backend: Backend, num_servers: int) -> int:
    """The level at which the servers of this run sleep now."""
    metas = backend.weight_source(backend.policy.served_dtype).metadata()
    weight_bytes = num_servers * sum(meta.num_bytes for meta in metas)
    return sleep_level(config.world.sleep_level, weight_bytes, psutil.virtual_memory().available)
