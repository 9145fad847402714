"""`WorldMap`: the cluster and the shares of it -> the list of jobs of a run. The public module of `placement/`.

Called by the launcher; every process loads the result from the run directory. Pure: no torch, no I/O; environment,
GPU list and ports are passed in. Waits for nothing.
"""

from __future__ import annotations

from typing import Literal

from pipelinerl.config import RunConfig
from pipelinerl.placement.cluster import DEFAULT_MASTER_PORT, Cluster, nvml_gpu_lister, usable_cores, visible_gpus
from pipelinerl.placement.jobs import JOB_KINDS, SERVER_KINDS, Job, WorldMap
from pipelinerl.placement.listed import Split
from pipelinerl.placement.place import Placer, PortSource
from pipelinerl.placement.slurm import is_slurm_step
from pipelinerl.placement.split import gpus_per_llm, split_cluster

__all__ = [
    "DEFAULT_MASTER_PORT",
    "JOB_KINDS",
    "SERVER_KINDS",
    "Cluster",
    "Job",
    "PortSource",
    "Split",
    "WorldMap",
    "build_world_map",
    "gpus_per_llm",
    "is_slurm_step",
    "nvml_gpu_lister",
    "split_cluster",
    "usable_cores",
    "visible_gpus",
]


def build_world_map(config: RunConfig, cluster: Cluster, ports: PortSource) -> WorldMap:
    """Plan the run: how many servers and trainer ranks, on which node, GPUs, cores and ports.

    Fractions are shares of all GPUs; servers get whole multiples of `gpus_per_llm` (tensor x pipeline parallel size),
    at least one server for a share above zero, and the trainer gets the rest. Explicit `world.num_*` keys
    win. Without GPUs every job gets cores instead.

    Raises:
        ConfigError: the split is impossible; the message holds the numbers.
    """
    split = split_cluster(config, cluster)
    jobs = Placer(config, cluster, split, ports).jobs()
    first_rank = next((job for job in jobs if job.kind == "finetune"), None)
    master_node = 0 if first_rank is None else first_rank.node_rank
    device: Literal["cpu", "cuda"] = "cpu" if split.device == "cpu" else "cuda"
    return WorldMap(
        jobs=jobs,
        device=device,
        world_size=cluster.world_size,
        rank=cluster.rank,
        gpus_per_llm=split.gpus_per_llm,
        master_addr=cluster.hosts[master_node],
        master_port=cluster.master_port or ports.take(master_node, DEFAULT_MASTER_PORT, "MASTER_PORT"),
    )
