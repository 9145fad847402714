"""Connects the trainer's rank 0 with the servers of the pool `actor` and with the launcher's word about them.

Called by `assemble`. Waits for the servers to come up, with the deadline of their start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from pipelinerl.config import RunConfig
from pipelinerl.config.rules_adapter import sends_adapter
from pipelinerl.finetune.server_pool import ServerPool
from pipelinerl.records import PoolAnswer, PoolChange
from pipelinerl.role import RoleContext
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC
from pipelinerl.streams.read import Feed
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.manifest import folder_checksum, local_folder
from pipelinerl.weights.sync import WeightPublisher


def open_pool(context: RoleContext, stack: ExitStack, wake: Callable[[], None]) -> tuple[WeightPublisher, ServerPool]:
    """A publisher that is connected with every server of the plan, and the servers that come and go from now on.

    Args:
        context: of the trainer's rank 0.
        stack: closes what was opened.
        wake: called when a server waits for weights.
    """
    publisher = stack.enter_context(make_publisher(context))
    pool = follow_pool(context, publisher, stack, wake)
    connect_servers(context, pool)
    return publisher, pool


def make_publisher(context: RoleContext) -> WeightPublisher:
    """A publisher without servers."""
    config: RunConfig = context.config
    return WeightPublisher(
        token=context.token,
        transport="nccl" if context.world.device == "cuda" else "gloo",
        transports={job.name: context.world.transport_to(job) for job in context.world.jobs_of("actor_llm")},
        timeout_s=config.supervise.weight_sync_timeout_s,
        kv_cache=config.vllm_config.kv_cache,
        master_address=context.world.master_addr,
        base_checksum=folder_checksum(local_folder(config.model_path)) if sends_adapter(config) else None,
    )


def connect_servers(context: RoleContext, pool: ServerPool) -> None:
    """Connect every server of the pool `actor` in the plan, once they are up."""
    addresses = [
        ServerAddress(job.name, str(job.url), job.weight_group_port) for job in context.world.jobs_of("actor_llm")
    ]
    with context.heartbeat.waiting("servers to start", deadline_s=context.config.vllm_config.start_timeout_s):
        pool.connect_all(addresses)


def follow_pool(
    context: RoleContext, publisher: WeightPublisher, stack: ExitStack, wake: Callable[[], None]
) -> ServerPool:
    """Follow the launcher's stream `pool` in a thread that `stack` ends."""
    answers = context.streams.writer(POOL_TOPIC, context.job.name, PoolAnswer)
    stack.callback(answers.close)

    def announce(answer: PoolAnswer) -> None:
        answers.write(answer)
        answers.flush()

    pool = ServerPool(
        publisher,
        [job.name for job in context.world.jobs_of("actor_llm")],
        context.config.vllm_config.start_timeout_s,
        announce,
        context.incarnation,
        wake,
    )
    feed = Feed(context.streams.reader(POOL_TOPIC, LAUNCHER, PoolChange), pool.take, "pool", pool.fail).start()
    stack.callback(feed.stop)
    return pool
