"""Placement by lists of GPUs (`world.actor_gpus` and the like), and what has to hold where GPUs are shared. Pure.

Called by `split` when the configuration names GPUs. Lists may overlap: who shares a GPU takes turns with
`world.placement=colocated`, and else works at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipelinerl.config import RunConfig
from pipelinerl.config.rules_sampling import vllm_option
from pipelinerl.config.sections import WorldConfig
from pipelinerl.errors import ConfigError
from pipelinerl.placement.cluster import Cluster

#: Of a shared GPU, what a server may take while it generates.
LARGEST_SHARED_PART = 0.85


@dataclass(frozen=True)
class Split:
    """Counts over the whole cluster. `device` is "cpu" or "cuda"."""

    device: str
    gpus_per_llm: int
    actor_llms: int
    preprocessor_llms: int
    finetune_ranks: int


def leave_room(config: RunConfig) -> None:
    """The trainer's weights stay on the GPU while a server generates there."""
    key, share = vllm_option(config, "gpu-memory-utilization")
    if isinstance(share, int | float) and share > LARGEST_SHARED_PART:
        raise ConfigError(
            key,
            share,
            f"at most {LARGEST_SHARED_PART} with world.placement=colocated: the trainer's weights stay on the GPU",
            "Use 0.5, and more if the model is small.",
        )


def listed_split(config: RunConfig, cluster: Cluster, per_llm: int) -> Split:
    """The counts that the lists name.

    Raises:
        ConfigError: a GPU that is not there, a server with another number of GPUs than its parallel size, several
            nodes, or a shared GPU without room for both.
    """
    world = config.world
    if cluster.world_size > 1:
        raise ConfigError(
            "world.actor_gpus", world.actor_gpus, "null with several nodes (WORLD_SIZE)", "Use the world.num_* keys."
        )
    for key in ("actor_gpus", "preprocessor_gpus"):
        servers: list[list[int]] = getattr(world, key) or []
        for gpus in servers:
            _are_there(key, gpus, cluster)
            if len(gpus) != per_llm:
                raise ConfigError(
                    f"world.{key}",
                    servers,
                    f"{per_llm} GPU(s) for each server, its tensor x pipeline parallel size",
                    "Change the list, or vllm_config.vllm_kwargs.tensor-parallel-size.",
                )
    _are_there("finetune_gpus", world.finetune_gpus or [], cluster)
    if world.placement == "colocated":
        leave_room(config)
    if (shared := _shared(world)) and vllm_option(config, "kv-cache-memory-bytes")[1] is None:
        raise ConfigError(
            "vllm_config.vllm_kwargs.kv-cache-memory-bytes",
            None,
            f"a number of bytes, because several processes share GPU {shared[0]}: without it a server measures free "
            "memory while it starts, and fails if the others take or free some",
            "Set for instance vllm_config.vllm_kwargs.kv-cache-memory-bytes=4294967296, and "
            "vllm_config.vllm_kwargs.gpu-memory-utilization to what has to be free when it starts, 0.2 for instance.",
        )
    return Split(
        device="cuda",
        gpus_per_llm=per_llm,
        actor_llms=len(world.actor_gpus or []),
        preprocessor_llms=len(world.preprocessor_gpus or []),
        finetune_ranks=len(world.finetune_gpus or []),
    )


def _are_there(key: str, gpus: list[int], cluster: Cluster) -> None:
    found = len(cluster.gpus)
    if any(gpu >= found for gpu in gpus):
        raise ConfigError(
            f"world.{key}",
            gpus,
            f"numbers from 0 to {found - 1}: {found} GPU(s) are visible",
            "They count places in CUDA_VISIBLE_DEVICES, or all GPUs of the machine without it.",
        )


def _shared(world: WorldConfig) -> list[int]:
    """GPUs that at least two jobs use at the same time. Colocated ranks wait until the servers are up."""
    jobs = [*(world.actor_gpus or []), *(world.preprocessor_gpus or [])]
    if world.placement != "colocated":
        jobs += [[gpu] for gpu in world.finetune_gpus or []]
    count = Counter(gpu for gpus in jobs for gpu in gpus)
    return sorted(gpu for gpu, times in count.items() if times > 1)
