"""How the cluster is shared: fractions or explicit counts -> number of servers and trainer ranks. Pure arithmetic."""

from __future__ import annotations

from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.sections import WorldConfig
from pipelinerl.errors import ConfigError
from pipelinerl.placement.cluster import Cluster
from pipelinerl.placement.listed import Split, leave_room, listed_split

_ROUNDING = 1e-9


def gpus_per_llm(vllm_kwargs: dict[str, Any]) -> int:
    """Tensor parallel size times pipeline parallel size of one server (keys with dashes or underscores)."""
    sizes = _parallel_sizes(vllm_kwargs)
    return sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"]


def _parallel_sizes(vllm_kwargs: dict[str, Any]) -> dict[str, int]:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    for key, value in vllm_kwargs.items():
        name = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}.get(key, key.replace("-", "_"))
        if name not in sizes:
            continue
        if not str(value).isdecimal() or int(value) < 1:
            raise ConfigError(
                f"vllm_config.vllm_kwargs.{key}", value, "an integer of at least 1", "Correct the number."
            )
        sizes[name] = int(value)
    return sizes


def split_cluster(config: RunConfig, cluster: Cluster) -> Split:
    """Decide the counts; ConfigError with the numbers if the split is impossible."""
    world = config.world
    per_llm = gpus_per_llm(config.vllm_config.vllm_kwargs)
    has_gpus = bool(cluster.gpus)
    if world.device == "cuda" and not has_gpus:
        raise ConfigError(
            "world.device", "cuda", "at least 1 GPU on this node, found 0", "Use world.device=auto or world.device=cpu."
        )
    listed = world.actor_gpus or world.preprocessor_gpus or world.finetune_gpus
    if listed and world.device == "auto" and not has_gpus:
        raise ConfigError(
            "world.device",
            "auto",
            "GPUs on this node, where lists name them (world.actor_gpus and the like); found 0",
            "Check CUDA_VISIBLE_DEVICES and the driver, or rehearse with world.device=cpu.",
        )
    if world.device == "cpu" or not has_gpus:
        return _cpu_split(world, _parallel_sizes(config.vllm_config.vllm_kwargs)["pipeline_parallel_size"])
    if listed:
        return listed_split(config, cluster, per_llm)
    if world.placement == "colocated":
        leave_room(config)
    split = _colocated_split if world.placement == "colocated" else _disaggregated_split
    return split(world, cluster, per_llm)


def _cpu_split(world: WorldConfig, pipeline_parallel: int) -> Split:
    """Without GPUs fractions have nothing to share: one of each that is asked for, unless `num_*` says more. The
    workers of a parallel server share its cores."""
    if pipeline_parallel > 1:
        raise ConfigError(
            "vllm_config.vllm_kwargs.pipeline-parallel-size",
            pipeline_parallel,
            "1 on CPUs: vLLM's engine for CPUs ends at the first request of a server in several stages",
            "Use tensor-parallel-size, or more servers (world.num_actor_llms).",
        )
    actor = world.num_actor_llms
    preprocessor = world.num_preprocessor_llms
    ranks = world.num_finetune_ranks
    return Split(
        device="cpu",
        gpus_per_llm=0,
        actor_llms=int(world.actor_fraction > 0) if actor is None else actor,
        preprocessor_llms=int(world.preprocessor_fraction > 0) if preprocessor is None else preprocessor,
        finetune_ranks=int(world.finetune_fraction > 0) if ranks is None else ranks,
    )


def _colocated_split(world: WorldConfig, cluster: Cluster, per_llm: int) -> Split:
    """Servers and trainer ranks share every GPU: one trainer rank a GPU, as many whole servers as fit."""
    total = cluster.world_size * len(cluster.gpus)
    fitting = _capacity(cluster, per_llm)
    if not fitting:
        raise _too_few_gpus(world, cluster, per_llm, f"{per_llm} for the actor servers")
    return Split(
        device="cuda",
        gpus_per_llm=per_llm,
        actor_llms=world.num_actor_llms or fitting,
        preprocessor_llms=world.num_preprocessor_llms or 0,
        finetune_ranks=world.num_finetune_ranks or total,
    )


def _disaggregated_split(world: WorldConfig, cluster: Cluster, per_llm: int) -> Split:
    """Every GPU has one owner. Servers get their proportional share in whole servers; the trainer gets the rest."""
    total = cluster.world_size * len(cluster.gpus)
    weights = {
        "actor": world.actor_fraction,
        "preprocessor": world.preprocessor_fraction,
        "finetune": world.finetune_fraction,
    }
    whole = sum(weights.values())
    if whole <= 0:
        raise ConfigError("world.actor_fraction", 0, "a sum of fractions above 0", "Set the three world.*_fraction.")

    def servers(pool: str, explicit: int | None) -> int:
        if explicit is not None:
            return explicit
        if weights[pool] <= 0:
            return 0
        share = int(total * weights[pool] / whole + _ROUNDING)
        return max(share // per_llm, 1)

    actor = servers("actor", world.num_actor_llms)
    preprocessor = servers("preprocessor", world.num_preprocessor_llms)
    capacity = _capacity(cluster, per_llm)
    wants_trainer = world.finetune_fraction > 0 or world.num_finetune_ranks is not None
    least_ranks = (world.num_finetune_ranks or 1) if wants_trainer else 0
    needed = (actor + preprocessor) * per_llm + least_ranks
    if needed > total or actor + preprocessor > capacity:
        parts = [f"{actor * per_llm} for {actor} actor servers"]
        if preprocessor:
            parts.append(f"{preprocessor * per_llm} for {preprocessor} reference servers")
        if least_ranks:
            parts.append(f"at least {least_ranks} for the trainer")
        raise _too_few_gpus(world, cluster, per_llm, ", ".join(parts))
    rest = total - (actor + preprocessor) * per_llm
    ranks = world.num_finetune_ranks if world.num_finetune_ranks is not None else (rest if wants_trainer else 0)
    return Split("cuda", per_llm, actor, preprocessor, ranks)


def _capacity(cluster: Cluster, per_llm: int) -> int:
    """How many whole servers fit; one server never spans two nodes."""
    return cluster.world_size * (len(cluster.gpus) // per_llm)


def _too_few_gpus(world: WorldConfig, cluster: Cluster, per_llm: int, needs: str) -> ConfigError:
    nodes, gpus = cluster.world_size, len(cluster.gpus)
    got = (
        f"actor:preprocessor:finetune = {world.actor_fraction:g}:{world.preprocessor_fraction:g}:"
        f"{world.finetune_fraction:g}, {per_llm} GPU(s) per server"
    )
    if nodes * gpus == 1:
        advice = "Use world.placement=colocated to let servers and trainer share the GPU, or world.device=cpu."
    elif per_llm > gpus:
        advice = f"Lower the tensor or pipeline parallel size to {gpus} or less: a server cannot span two nodes."
    else:
        advice = "Change the fractions, lower the parallel sizes, or use world.placement=colocated."
    return ConfigError("world", got, f"a split that fits {nodes} node(s) x {gpus} GPU(s); it needs {needs}", advice)
