"""Which job goes where: counts -> `Job`s with node, GPUs, ports and cores. Pure; ports come from the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import ConfigError
from pipelinerl.placement.cluster import Cluster, url_of
from pipelinerl.placement.jobs import Job
from pipelinerl.placement.listed import Split


class PortSource(Protocol):
    """Hands out TCP ports. A port is handed out once per node."""

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        """A port that is free on that node: `preferred`, or another one. `key` is where the user sets it."""
        ...


@dataclass
class _FreeGpus:
    """GPUs of every node that no job has yet, in the order of the node's list."""

    by_node: list[list[str]]

    def take(self, count: int) -> tuple[int, list[str]] | None:
        """`count` GPUs of the first node that still has so many."""
        for node, free in enumerate(self.by_node):
            if len(free) >= count:
                taken, self.by_node[node] = free[:count], free[count:]
                return node, taken
        return None

    def singles(self) -> list[tuple[int, str]]:
        """What is left as (node, GPU), node by node."""
        return [(node, gpu) for node, free in enumerate(self.by_node) for gpu in free]


@dataclass
class Placer:
    """Builds the jobs of one run; `jobs()` is the only thing to call."""

    config: RunConfig
    cluster: Cluster
    split: Split
    ports: PortSource
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def jobs(self) -> list[Job]:
        """All jobs in start order: servers, then actor and preprocessor, then trainer ranks."""
        world = self.config.world
        free = self._all_gpus()
        servers = self._servers("actor_llm", self.split.actor_llms, free)
        servers += self._servers("preprocessor_llm", self.split.preprocessor_llms, free)
        if self.config.environment is not None:
            servers += self._services("environment", world.env_replicas)
        servers += self._services("verifier", world.verifier_replicas)
        clients = [self._job(kind, 0, 0, []) for kind in ("actor", "preprocessor")]
        ranks = self._ranks(self._all_gpus() if world.placement == "colocated" else free)
        jobs = [*self._with_group_ports(servers, ranks), *clients, *ranks]
        return self._with_cores([job for job in jobs if has_stage(self.config, job.kind)])

    def _all_gpus(self) -> _FreeGpus:
        return _FreeGpus([list(self.cluster.gpus) for _ in range(self.cluster.world_size)])

    def _servers(self, kind: str, count: int, free: _FreeGpus) -> list[Job]:
        jobs = []
        for idx in range(count):
            node, gpus = idx % self.cluster.world_size, list[str]()
            listed = self._listed(f"{kind.removesuffix('_llm')}_gpus")
            if listed:
                gpus = [self.cluster.gpus[number] for number in listed[idx]]
            elif self.split.device == "cuda":
                place = free.take(self.split.gpus_per_llm)
                if place is None:
                    raise ConfigError(
                        f"world.num_{kind}s",
                        count,
                        f"whole servers of {self.split.gpus_per_llm} GPU(s) that fit "
                        f"{self.cluster.world_size} node(s) x {len(self.cluster.gpus)} GPU(s)",
                        "Lower the number of servers; a server cannot span two nodes.",
                    )
                node, gpus = place
            port = self.ports.take(node, self.config.world.llm_start_port + idx, "world.llm_start_port")
            jobs.append(self._job(kind, idx, node, gpus, port))
        return jobs

    def _listed(self, key: str) -> list[Any] | None:
        """The user's list of GPUs of a pool; on a CPU such a list only says how many there are."""
        return getattr(self.config.world, key) if self.split.device == "cuda" else None

    def _services(self, kind: str, count: int) -> list[Job]:
        jobs = []
        for idx in range(count):
            node = idx % self.cluster.world_size
            start = self.config.world.environment_start_port
            port = self.ports.take(node, start + idx, "world.environment_start_port")
            jobs.append(self._job(kind, idx, node, [], port))
        return jobs

    def _ranks(self, free: _FreeGpus) -> list[Job]:
        count, nodes = self.split.finetune_ranks, self.cluster.world_size
        if self.split.device == "cpu":
            return [self._job("finetune", i, i * nodes // count, []) for i in range(count)]
        if listed := self._listed("finetune_gpus"):
            return [self._job("finetune", i, 0, [self.cluster.gpus[number]]) for i, number in enumerate(listed)]
        slots = free.singles()[:count]
        if len(slots) < count:
            raise ConfigError(
                "world.num_finetune_ranks", count, f"at most {len(slots)} (free GPUs)", "Lower the number of ranks."
            )
        return [self._job("finetune", i, node, [gpu]) for i, (node, gpu) in enumerate(slots)]

    def _job(self, kind: str, idx: int, node: int, gpus: list[str], port: int | None = None) -> Job:
        local_idx = self._counts.get((kind, node), 0)
        self._counts[kind, node] = local_idx + 1
        host = self.cluster.hosts[node]
        url = None if port is None else url_of(host, port)
        return Job(kind, f"{kind}_{idx}", idx, local_idx, node, host, gpus, port, url, None, cores=1)

    def _with_group_ports(self, servers: list[Job], ranks: list[Job]) -> list[Job]:
        """Give each actor server the port where it meets trainer rank 0; the port is one of rank 0's node."""
        node = ranks[0].node_rank if ranks else 0
        start, key = self.config.world.actor_group_port, "world.actor_group_port"
        return [
            msgspec.structs.replace(job, weight_group_port=self.ports.take(node, start + job.idx, key))
            if job.kind == "actor_llm"
            else job
            for job in servers
        ]

    def _with_cores(self, jobs: list[Job]) -> list[Job]:
        """Share the cores of each node among its servers and trainer ranks; other jobs take one each."""
        heavy_kinds = ("actor_llm", "preprocessor_llm", "finetune")
        heavy = [job.node_rank for job in jobs if job.kind in heavy_kinds]
        return [
            msgspec.structs.replace(job, cores=max(1, self.cluster.cores // heavy.count(job.node_rank)))
            if job.kind in heavy_kinds
            else job
            for job in jobs
        ]
