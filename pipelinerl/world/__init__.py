"""The plan of a run: from the cluster and its split to the list of jobs, which every process loads. No torch."""

from __future__ import annotations

from pipelinerl.world.cluster import (
    DEFAULT_MASTER_PORT,
    LOOPBACK,
    Cluster,
    ClusterMember,
    ClusterNode,
    FreePorts,
    can_bind,
    cards_of,
    described_cluster,
    memory_of_machine,
    nvml_cards,
    scanned_ports,
    slurm_hint,
    usable_cores,
)
from pipelinerl.world.jobs import SERVER_KINDS, Job, WorldMap
from pipelinerl.world.plan import build_world_map

__all__ = [
    "DEFAULT_MASTER_PORT",
    "LOOPBACK",
    "SERVER_KINDS",
    "Cluster",
    "ClusterMember",
    "ClusterNode",
    "FreePorts",
    "Job",
    "WorldMap",
    "build_world_map",
    "can_bind",
    "cards_of",
    "described_cluster",
    "memory_of_machine",
    "nvml_cards",
    "scanned_ports",
    "slurm_hint",
    "usable_cores",
]
