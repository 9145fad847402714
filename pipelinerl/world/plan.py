"""Which job goes where: shares of the cluster become numbers of servers and trainer ranks, and those become jobs with
node, GPUs, ports and cores.

Shares are fractions of all GPUs, explicit counts (`world.num_*`), or lists of GPUs (`world.actor_gpus` and the like).
Lists may overlap: jobs that share a GPU alternate with `world.placement=colocated`, and else work at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import WorldConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import ConfigError
from pipelinerl.world.cluster import DEFAULT_MASTER_PORT, Cluster, url_of
from pipelinerl.world.jobs import Job, WorldMap
from pipelinerl.world.ports import FreePorts

#: Of a shared GPU, the share that a server may use while it generates.
LARGEST_SHARE = 0.85
_ROUNDING = 1e-9
_HEAVY_KINDS = ("actor_llm", "preprocessor_llm", "finetune")


@dataclass(frozen=True)
class _Split:
    """Counts over the whole cluster."""

    device: Literal["cpu", "cuda"]
    gpus_per_llm: int
    actor_llms: int
    preprocessor_llms: int
    finetune_ranks: int


def build_world_map(config: RunConfig, cluster: Cluster, ports: FreePorts) -> WorldMap:
    """Plan the run: how many servers and trainer ranks, on which node, GPUs, cores and ports.

    Fractions are shares of all GPUs; servers get whole multiples of tensor x pipeline parallel size, at least one
    server for a share above zero, and the trainer gets the rest. Explicit `world.num_*` keys win. Without GPUs every
    job gets cores instead.

    Raises:
        ConfigError: the split is impossible; the message holds the numbers.
    """
    split = _split_cluster(config, cluster)
    jobs = _Placer(config, cluster, split, ports).jobs()
    first_rank = next((job for job in jobs if job.kind == "finetune"), None)
    master_node = 0 if first_rank is None else first_rank.node_rank
    return WorldMap(
        jobs=jobs,
        device=split.device,
        world_size=cluster.world_size,
        rank=cluster.rank,
        master_addr=cluster.hosts[master_node],
        master_port=cluster.master_port or ports.take(master_node, DEFAULT_MASTER_PORT, "MASTER_PORT"),
    )


def _split_cluster(config: RunConfig, cluster: Cluster) -> _Split:
    """Decide the counts; ConfigError with the numbers if the split is impossible."""
    world = config.world
    tensor, pipeline = _parallel_sizes(config.vllm_config.vllm_kwargs)
    has_gpus = bool(cluster.gpus)
    listed = world.actor_gpus or world.preprocessor_gpus or world.finetune_gpus
    if not has_gpus and (world.device == "cuda" or (listed and world.device == "auto")):
        raise ConfigError(
            "world.device",
            world.device,
            "GPUs on this node, where the configuration asks for them; found 0",
            "Check CUDA_VISIBLE_DEVICES and the driver, or use world.device=cpu (without lists of GPUs also auto).",
        )
    if world.device == "cpu" or not has_gpus:
        return _cpu_split(world, pipeline)
    if world.placement == "colocated":
        _check_room(config)
    if listed:
        return _listed_split(config, cluster, tensor * pipeline)
    split = _colocated_split if world.placement == "colocated" else _disaggregated_split
    return split(world, cluster, tensor * pipeline)


def _parallel_sizes(vllm_kwargs: dict[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline parallel size of one server (keys with dashes or underscores, or vLLM's abbreviations)."""
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
    return sizes["tensor_parallel_size"], sizes["pipeline_parallel_size"]


def _cpu_split(world: WorldConfig, pipeline_parallel: int) -> _Split:
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
    return _Split(
        device="cpu",
        gpus_per_llm=0,
        actor_llms=int(world.actor_fraction > 0) if actor is None else actor,
        preprocessor_llms=int(world.preprocessor_fraction > 0) if preprocessor is None else preprocessor,
        finetune_ranks=int(world.finetune_fraction > 0) if ranks is None else ranks,
    )


def _colocated_split(world: WorldConfig, cluster: Cluster, per_llm: int) -> _Split:
    """Servers and trainer ranks share every GPU: one trainer rank a GPU, as many whole servers as fit."""
    total = cluster.world_size * len(cluster.gpus)
    fitting = _capacity(cluster, per_llm)
    if not fitting:
        raise _too_few_gpus(world, cluster, per_llm, f"{per_llm} for the actor servers")
    actor, preprocessor = world.num_actor_llms or fitting, world.num_preprocessor_llms or 0
    return _Split("cuda", per_llm, actor, preprocessor, world.num_finetune_ranks or total)


def _disaggregated_split(world: WorldConfig, cluster: Cluster, per_llm: int) -> _Split:
    """Every GPU has one owner. Servers get their proportional share in whole servers; the trainer gets the rest."""
    total = cluster.world_size * len(cluster.gpus)
    whole = world.actor_fraction + world.preprocessor_fraction + world.finetune_fraction
    if whole <= 0:
        raise ConfigError("world.actor_fraction", 0, "a sum of fractions above 0", "Set the three world.*_fraction.")

    def servers(fraction: float, explicit: int | None) -> int:
        if explicit is not None:
            return explicit
        share = int(total * fraction / whole + _ROUNDING)
        return max(share // per_llm, 1) if fraction > 0 else 0

    actor = servers(world.actor_fraction, world.num_actor_llms)
    preprocessor = servers(world.preprocessor_fraction, world.num_preprocessor_llms)
    wants_trainer = world.finetune_fraction > 0 or world.num_finetune_ranks is not None
    least_ranks = (world.num_finetune_ranks or 1) if wants_trainer else 0
    rest = total - (actor + preprocessor) * per_llm
    if rest < least_ranks or actor + preprocessor > _capacity(cluster, per_llm):
        needs = [f"{actor * per_llm} for {actor} actor servers"]
        if preprocessor:
            needs.append(f"{preprocessor * per_llm} for {preprocessor} reference servers")
        if least_ranks:
            needs.append(f"at least {least_ranks} for the trainer")
        raise _too_few_gpus(world, cluster, per_llm, ", ".join(needs))
    ranks = world.num_finetune_ranks if world.num_finetune_ranks is not None else (rest if wants_trainer else 0)
    return _Split("cuda", per_llm, actor, preprocessor, ranks)


def _listed_split(config: RunConfig, cluster: Cluster, per_llm: int) -> _Split:
    """The counts that the lists name.

    Raises:
        ConfigError: a GPU that does not exist, a server with another number of GPUs than its parallel size, several
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
            _check_exist(key, gpus, cluster)
            if len(gpus) != per_llm:
                raise ConfigError(
                    f"world.{key}",
                    servers,
                    f"{per_llm} GPU(s) for each server, its tensor x pipeline parallel size",
                    "Change the list, or vllm_config.vllm_kwargs.tensor-parallel-size.",
                )
    _check_exist("finetune_gpus", world.finetune_gpus or [], cluster)
    # GPUs that at least two jobs use at the same time. Colocated ranks wait until the servers are up.
    used = [*(world.actor_gpus or []), *(world.preprocessor_gpus or [])]
    if world.placement != "colocated":
        used += [[gpu] for gpu in world.finetune_gpus or []]
    shared = sorted(gpu for gpu, times in Counter(gpu for gpus in used for gpu in gpus).items() if times > 1)
    if shared and config.vllm_config.option("kv-cache-memory-bytes")[1] is None:
        raise ConfigError(
            "vllm_config.vllm_kwargs.kv-cache-memory-bytes",
            None,
            f"a number of bytes, because several processes share GPU {shared[0]}: without it a server measures free "
            "memory while it starts, and fails if the others allocate or free some",
            "Set for instance vllm_config.vllm_kwargs.kv-cache-memory-bytes=4294967296, and "
            "vllm_config.vllm_kwargs.gpu-memory-utilization to what has to be free when it starts, 0.2 for instance.",
        )
    counts = [len(gpus or []) for gpus in (world.actor_gpus, world.preprocessor_gpus, world.finetune_gpus)]
    return _Split("cuda", per_llm, *counts)


def _check_exist(key: str, gpus: list[int], cluster: Cluster) -> None:
    found = len(cluster.gpus)
    if any(gpu >= found for gpu in gpus):
        raise ConfigError(
            f"world.{key}",
            gpus,
            f"numbers from 0 to {found - 1}: {found} GPU(s) are visible",
            "They count places in CUDA_VISIBLE_DEVICES, or all GPUs of the machine without it.",
        )


def _check_room(config: RunConfig) -> None:
    """Colocated, the trainer's weights stay on the GPU while a server generates there."""
    key, share = config.vllm_config.option("gpu-memory-utilization")
    if isinstance(share, int | float) and share > LARGEST_SHARE:
        raise ConfigError(
            key,
            share,
            f"at most {LARGEST_SHARE} with world.placement=colocated: the trainer's weights stay on the GPU",
            "Use 0.5, and more if the model is small.",
        )


def _capacity(cluster: Cluster, per_llm: int) -> int:
    """How many whole servers fit; one server never spans two nodes."""
    return cluster.world_size * (len(cluster.gpus) // per_llm)


def _too_few_gpus(world: WorldConfig, cluster: Cluster, per_llm: int, needs: str) -> ConfigError:
    nodes, gpus = cluster.world_size, len(cluster.gpus)
    fractions = (world.actor_fraction, world.preprocessor_fraction, world.finetune_fraction)
    shares = ":".join(f"{fraction:g}" for fraction in fractions)
    got = f"actor:preprocessor:finetune = {shares}, {per_llm} GPU(s) per server"
    if nodes * gpus == 1:
        advice = "Use world.placement=colocated to let servers and trainer share the GPU, or world.device=cpu."
    elif per_llm > gpus:
        advice = f"Lower the tensor or pipeline parallel size to {gpus} or less: a server cannot span two nodes."
    else:
        advice = "Change the fractions, lower the parallel sizes, or use world.placement=colocated."
    return ConfigError("world", got, f"a split that fits {nodes} node(s) x {gpus} GPU(s); it needs {needs}", advice)


class _Placer:
    """Builds the jobs of one run; `jobs()` is the only thing to call."""

    def __init__(self, config: RunConfig, cluster: Cluster, split: _Split, ports: FreePorts) -> None:
        self._config = config
        self._cluster = cluster
        self._split = split
        self._ports = ports
        self._counts = Counter[tuple[str, int]]()

    def jobs(self) -> list[Job]:
        """All jobs in start order: servers, then actor and preprocessor, then trainer ranks."""
        world = self._config.world
        free = self._all_gpus()
        servers = self._servers("actor_llm", self._split.actor_llms, free)
        servers += self._servers("preprocessor_llm", self._split.preprocessor_llms, free)
        if self._config.environment is not None:
            servers += self._services("environment", world.env_replicas)
        servers += self._services("verifier", world.verifier_replicas)
        clients = [self._job(kind, 0, 0, []) for kind in ("actor", "preprocessor")]
        ranks = self._ranks(self._all_gpus() if world.placement == "colocated" else free)
        jobs = [*self._with_group_ports(servers, ranks), *clients, *ranks]
        return self._with_cores([job for job in jobs if has_stage(self._config, job.kind)])

    def _all_gpus(self) -> list[list[str]]:
        """GPUs of every node, in the order of the node's list."""
        return [list(self._cluster.gpus) for _ in range(self._cluster.world_size)]

    def _servers(self, kind: str, count: int, free: list[list[str]]) -> list[Job]:
        """Servers take their GPUs off `free`, from the first node that still has enough."""
        size, jobs = self._split.gpus_per_llm, []
        listed = self._listed(f"{kind.removesuffix('_llm')}_gpus")
        for idx in range(count):
            node, gpus = idx % self._cluster.world_size, list[str]()
            if listed:
                gpus = [self._cluster.gpus[number] for number in listed[idx]]
            elif self._split.device == "cuda":
                fitting = [node for node, left in enumerate(free) if len(left) >= size]
                if not fitting:
                    raise ConfigError(
                        f"world.num_{kind}s",
                        count,
                        f"whole servers of {size} GPU(s) that fit {self._cluster.world_size} node(s) x "
                        f"{len(self._cluster.gpus)} GPU(s)",
                        "Lower the number of servers; a server cannot span two nodes.",
                    )
                node = fitting[0]
                gpus, free[node] = free[node][:size], free[node][size:]
            port = self._ports.take(node, self._config.world.llm_start_port + idx, "world.llm_start_port")
            jobs.append(self._job(kind, idx, node, gpus, port))
        return jobs

    def _listed(self, key: str) -> list[Any] | None:
        """The user's list of GPUs of a pool; on a CPU such a list only says how many there are."""
        return getattr(self._config.world, key) if self._split.device == "cuda" else None

    def _services(self, kind: str, count: int) -> list[Job]:
        start, key = self._config.world.environment_start_port, "world.environment_start_port"
        nodes = [idx % self._cluster.world_size for idx in range(count)]
        return [
            self._job(kind, idx, node, [], self._ports.take(node, start + idx, key)) for idx, node in enumerate(nodes)
        ]

    def _ranks(self, free: list[list[str]]) -> list[Job]:
        count, nodes = self._split.finetune_ranks, self._cluster.world_size
        if self._split.device == "cpu":
            return [self._job("finetune", i, i * nodes // count, []) for i in range(count)]
        if listed := self._listed("finetune_gpus"):
            return [self._job("finetune", i, 0, [self._cluster.gpus[number]]) for i, number in enumerate(listed)]
        slots = [(node, gpu) for node, left in enumerate(free) for gpu in left][:count]
        if len(slots) < count:
            raise ConfigError(
                "world.num_finetune_ranks", count, f"at most {len(slots)} (free GPUs)", "Lower the number of ranks."
            )
        return [self._job("finetune", i, node, [gpu]) for i, (node, gpu) in enumerate(slots)]

    def _job(self, kind: str, idx: int, node: int, gpus: list[str], port: int | None = None) -> Job:
        local_idx = self._counts[kind, node]
        self._counts[kind, node] += 1
        host = self._cluster.hosts[node]
        url = None if port is None else url_of(host, port)
        return Job(kind, f"{kind}_{idx}", idx, local_idx, node, host, gpus, port, url, None, cores=1)

    def _with_group_ports(self, servers: list[Job], ranks: list[Job]) -> list[Job]:
        """Give each actor server the port where it meets trainer rank 0; the port is one of rank 0's node."""
        node = ranks[0].node_rank if ranks else 0
        start, key = self._config.world.actor_group_port, "world.actor_group_port"
        return [
            msgspec.structs.replace(job, weight_group_port=self._ports.take(node, start + job.idx, key))
            if job.kind == "actor_llm"
            else job
            for job in servers
        ]

    def _with_cores(self, jobs: list[Job]) -> list[Job]:
        """Share the cores of each node among its servers and trainer ranks; other jobs take one each."""
        heavy = Counter(job.node_rank for job in jobs if job.kind in _HEAVY_KINDS)
        return [
            msgspec.structs.replace(job, cores=max(1, self._cluster.cores // heavy[job.node_rank]))
            if job.kind in _HEAVY_KINDS
            else job
            for job in jobs
        ]
