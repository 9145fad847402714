"""Placement: shares of the cluster become numbers of servers and trainer ranks, and these become jobs with node, GPUs,
ports and cores.

Shares are fractions of all GPUs, explicit counts (`world.num_*`), or lists of GPUs (`world.actor_gpus` and the like).
Lists may overlap: jobs that share a GPU alternate with `world.placement=colocated`, and otherwise run at the same time.
A GPU of the actor's share runs one or several servers (`sharing`). A single GPU is shared by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import WorldConfig
from pipelinerl.errors import ConfigError
from pipelinerl.world.cluster import DEFAULT_MASTER_PORT, Cluster, FreePorts, url_of
from pipelinerl.world.jobs import Job, WorldMap
from pipelinerl.world.model_shape import ModelShape
from pipelinerl.world.sharing import free_cores, needs_of, rollout_workers, servers_on_gpu, with_memory

#: Of a shared GPU, the share that a server may use while it generates.
LARGEST_SHARE = 0.85
_ROUNDING = 1e-9
_HEAVY_KINDS = ("actor_llm", "preprocessor_llm", "finetune")
#: Servers on one GPU, given the GPUs with servers, the ranks, and whether a rank works on the same GPU.
_PerGpu = Callable[[int, int, bool], int]


@dataclass(frozen=True)
class _Split:
    """Counts over the whole cluster. `llms_per_gpu`: actor servers on one GPU; `is_shared`: ranks have the GPUs of
    servers."""

    device: Literal["cpu", "cuda"]
    gpus_per_llm: int
    actor_llms: int
    preprocessor_llms: int
    finetune_ranks: int
    llms_per_gpu: int = 1
    is_shared: bool = False

    @property
    def actor_places(self) -> int:
        """GPUs, or groups of GPUs, that actor servers have."""
        return -(-self.actor_llms // self.llms_per_gpu)


def build_world_map(
    config: RunConfig, cluster: Cluster, ports: FreePorts | None = None, model: ModelShape | None = None
) -> WorldMap:
    """Plan the run: how many servers and trainer ranks, on which node, GPUs, cores and ports.

    Fractions are shares of all GPUs; servers get whole multiples of tensor x pipeline parallel size, at least one
    server for a share above zero, and the trainer gets the rest. Explicit `world.num_*` keys win. Without GPUs every
    job gets cores instead.

    Args:
        ports: None: ports that are free now, of which none is reserved.
        model: None: its size is not known.

    Raises:
        ConfigError: the split is impossible; the message holds the numbers.
    """
    ports = ports or FreePorts(config, cluster.rank, reserve=False)
    split = _split_cluster(config, cluster, model)
    jobs, doubts = _Placer(config, cluster, split, ports).jobs(), list[str]()
    if split.device == "cuda":
        jobs, doubts = with_memory(config, jobs, needs_of(config, cluster, model, split.finetune_ranks))
    first_rank = next((job for job in jobs if job.kind == "finetune"), None)
    master_node = 0 if first_rank is None else first_rank.node_rank
    return WorldMap(
        jobs=jobs,
        device=split.device,
        world_size=cluster.world_size,
        master_addr=cluster.hosts[master_node],
        master_port=cluster.master_port or ports.take(master_node, DEFAULT_MASTER_PORT, "MASTER_PORT"),
        notes=[*_notes(config, split, jobs), *doubts],
    )


def _notes(config: RunConfig, split: _Split, jobs: list[Job]) -> list[str]:
    """Decisions that the user did not make explicitly."""
    workers = max((job.workers for job in jobs if job.kind == "actor"), default=1)
    of_actor = [f"{workers} processes run rollouts"] if config.actor.rollout_workers == "auto" and workers > 1 else []
    return [*_sharing_notes(config, split, jobs), *of_actor]


def _sharing_notes(config: RunConfig, split: _Split, jobs: list[Job]) -> list[str]:
    caches = {job.cache_bytes for job in jobs if job.kind == "actor_llm" and job.cache_bytes is not None}
    cache = f" (key-value cache {min(caches) / 2**30:.1f} GiB each)" if caches else ""
    if split.is_shared and config.world.placement != "colocated":
        count = f"{split.actor_llms} server" + "s" * (split.actor_llms > 1)
        return [f"one GPU: {count}{cache} and the trainer share it and work at the same time"]
    if split.llms_per_gpu > 1:
        chosen = config.world.servers_per_gpu
        return [f"world.servers_per_gpu={chosen}: {split.llms_per_gpu} servers{cache} on each GPU of the actor"]
    return []


def _split_cluster(config: RunConfig, cluster: Cluster, model: ModelShape | None) -> _Split:
    """Decide the counts; ConfigError with the numbers if the split is impossible."""
    world = config.world
    tensor, pipeline = (_parallel_size(config, kind) for kind in ("tensor", "pipeline"))
    has_gpus = cluster.num_gpus > 0
    listed = world.actor_gpus or world.preprocessor_gpus or world.finetune_gpus
    if not has_gpus and (world.device == "cuda" or (listed and world.device == "auto")):
        raise ConfigError(
            "world.device",
            world.device,
            "GPUs, where the configuration asks for them; found 0",
            "Check CUDA_VISIBLE_DEVICES and the driver, or use world.device=cpu (without lists of GPUs also auto).",
        )
    if world.device == "cpu" or not has_gpus:
        return _cpu_split(world, pipeline)
    per_llm = tensor * pipeline
    if world.placement == "colocated":
        _check_room(config)
    if listed:
        return _listed_split(config, cluster, per_llm)
    if per_llm > 1 and world.servers_per_gpu not in ("auto", 1):
        raise ConfigError(
            "world.servers_per_gpu",
            world.servers_per_gpu,
            f"auto or 1 with servers of {per_llm} GPUs (tensor x pipeline parallel size)",
            "Leave it out, or set both parallel sizes to 1.",
        )

    def per_gpu(gpus: int, ranks: int, shared: bool) -> int:
        """Servers on each of `gpus` GPUs, with `ranks` ranks elsewhere, or `shared` on the same ones."""
        if world.servers_per_gpu != "auto":
            return world.servers_per_gpu
        if per_llm > 1 or world.num_actor_llms is not None:
            return 1
        on_node = [min(count, cluster.most_gpus) for count in (gpus, ranks)]
        needs = needs_of(config, cluster, model, ranks)
        return servers_on_gpu(needs, free_cores(config, cluster, *on_node), shared)

    fitting = sum(len(machine.gpus) // per_llm for machine in cluster.nodes)  # one server never spans two nodes
    if world.placement == "colocated":  # one rank on each GPU, and as many whole servers as fit
        ranks = world.num_finetune_ranks or cluster.num_gpus
        servers = per_gpu(fitting, ranks, False)
        llms = world.num_actor_llms or max(1, fitting) * servers
        split = _Split("cuda", per_llm, llms, world.num_preprocessor_llms or 0, ranks, servers, True)
    elif per_llm == 1 and _shares_the_only_gpu(world, cluster):
        servers = per_gpu(1, 1, True)
        llms = world.num_actor_llms or servers
        split = _Split("cuda", 1, llms, 0, 1, llms if world.servers_per_gpu == "auto" else servers, True)
    else:
        split = _disaggregated_split(world, cluster, per_llm, per_gpu)
    places = split.actor_places + split.preprocessor_llms
    for_ranks = cluster.num_gpus - (0 if split.is_shared else places * per_llm)
    if places > fitting or split.finetune_ranks > for_ranks:
        raise _too_few_gpus(world, cluster, split, fitting)
    return split


def _shares_the_only_gpu(world: WorldConfig, cluster: Cluster) -> bool:
    """Whether servers and a trainer rank have to share one GPU, and the configuration allows it."""
    wants_servers = world.actor_fraction > 0 or world.num_actor_llms is not None
    wants_both = wants_servers and (world.finetune_fraction > 0 or world.num_finetune_ranks is not None)
    has_reference = world.preprocessor_fraction > 0 or bool(world.num_preprocessor_llms)
    is_free = world.device == "auto" and (world.num_finetune_ranks or 1) == 1
    return cluster.num_gpus == 1 and wants_both and is_free and not has_reference


def _parallel_size(config: RunConfig, kind: str) -> int:
    """Tensor or pipeline parallel size of one server, by its long name or vLLM's abbreviation."""
    options = (config.vllm_config.option(name) for name in (f"{kind}-parallel-size", f"{kind[0]}p"))
    key, size = next((option for option in options if option[1] is not None), ("", 1))
    if not str(size).isdecimal() or int(size) < 1:
        raise ConfigError(key, size, "an integer of at least 1", "Correct the number.")
    return int(size)


def _cpu_split(world: WorldConfig, pipeline_parallel: int) -> _Split:
    """Without GPUs there is nothing to split: one job per pool with a fraction above 0, unless `num_*` sets a count.
    The workers of a parallel server share its cores."""
    if pipeline_parallel > 1:
        raise ConfigError(
            "vllm_config.vllm_kwargs.pipeline-parallel-size",
            pipeline_parallel,
            "1 on CPUs: vLLM's engine for CPUs ends at the first request of a server in several stages",
            "Use tensor-parallel-size, or more servers (world.num_actor_llms).",
        )
    asked = (
        (world.num_actor_llms, world.actor_fraction),
        (world.num_preprocessor_llms, world.preprocessor_fraction),
        (world.num_finetune_ranks, world.finetune_fraction),
    )
    actor, preprocessor, ranks = (int(share > 0) if count is None else count for count, share in asked)
    return _Split("cpu", 0, actor, preprocessor, ranks)


def _disaggregated_split(world: WorldConfig, cluster: Cluster, per_llm: int, per_gpu: _PerGpu) -> _Split:
    """Every GPU has one owner. Servers get their share in whole servers; the trainer gets the rest."""
    total = cluster.num_gpus
    whole = world.actor_fraction + world.preprocessor_fraction + world.finetune_fraction
    if whole <= 0:
        raise ConfigError("world.actor_fraction", 0, "a sum of fractions above 0", "Set the three world.*_fraction.")

    def places(fraction: float, explicit: int | None) -> int:
        if explicit is not None:
            return explicit
        share = int(total * fraction / whole + _ROUNDING)
        return max(share // per_llm, 1) if fraction > 0 else 0

    ranks = int(world.finetune_fraction > 0) if world.num_finetune_ranks is None else world.num_finetune_ranks
    preprocessor = places(world.preprocessor_fraction, world.num_preprocessor_llms)
    actor = places(world.actor_fraction, world.num_actor_llms)
    servers = per_gpu(actor, max(ranks, total - (actor + preprocessor) * per_llm), False) if actor else 1
    # `num_actor_llms` counts servers, a fraction counts GPUs.
    llms = actor if world.num_actor_llms is not None else actor * servers
    split = _Split("cuda", per_llm, llms, preprocessor, ranks, servers)
    if ranks and world.num_finetune_ranks is None:
        rest = total - (split.actor_places + preprocessor) * per_llm
        split = replace(split, finetune_ranks=max(ranks, rest))
    return split


def _listed_split(config: RunConfig, cluster: Cluster, per_llm: int) -> _Split:
    """The counts that the lists name.

    Raises:
        ConfigError: a GPU that does not exist, a server with another number of GPUs than its parallel size, or several
            nodes.
    """
    world = config.world
    if cluster.world_size > 1:
        raise ConfigError("world.actor_gpus", world.actor_gpus, "null with several nodes", "Use the world.num_* keys.")
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
    actor, preprocessor, ranks = (
        len(gpus or []) for gpus in (world.actor_gpus, world.preprocessor_gpus, world.finetune_gpus)
    )
    return _Split("cuda", per_llm, actor, preprocessor, ranks)


def _check_exist(key: str, gpus: list[int], cluster: Cluster) -> None:
    found = cluster.num_gpus
    if any(gpu >= found for gpu in gpus):
        raise ConfigError(
            f"world.{key}",
            gpus,
            f"numbers from 0 to {found - 1}: {found} GPU(s) are visible",
            "They count places in CUDA_VISIBLE_DEVICES, or all GPUs of the machine without it.",
        )


def _check_room(config: RunConfig) -> None:
    """Colocated, the trainer's weights stay on the GPU while a server generates there."""
    if config.gpu_memory_share > LARGEST_SHARE:
        raise ConfigError(
            *config.vllm_config.option("gpu-memory-utilization"),
            f"at most {LARGEST_SHARE} with world.placement=colocated: the trainer's weights stay on the GPU",
            "Use 0.5, and more if the model is small.",
        )


def _too_few_gpus(world: WorldConfig, cluster: Cluster, split: _Split, fitting: int) -> ConfigError:
    """`fitting`: how many groups of GPUs there are that can have servers."""
    most, per_llm = cluster.most_gpus, split.gpus_per_llm
    if split.is_shared and per_llm <= most:  # then a count is too high
        key, count, limit = "num_finetune_ranks", split.finetune_ranks, cluster.num_gpus
        if count <= limit:
            key, count, limit = "num_actor_llms", split.actor_llms, fitting * split.llms_per_gpu
        return ConfigError(f"world.{key}", count, f"at most {limit} on {cluster.describe()}", "Lower it.")
    needs = [f"{split.actor_places * per_llm} for {split.actor_llms} actor servers"]
    if split.preprocessor_llms:
        needs.append(f"{split.preprocessor_llms * per_llm} for {split.preprocessor_llms} reference servers")
    if split.finetune_ranks:
        needs.append(f"at least {world.num_finetune_ranks or 1} for the trainer")
    fractions = (world.actor_fraction, world.preprocessor_fraction, world.finetune_fraction)
    shares = ":".join(f"{fraction:g}" for fraction in fractions)
    got = f"actor:preprocessor:finetune = {shares}, {per_llm} GPU(s) per server"
    if per_llm > most:
        advice = f"Lower the tensor or pipeline parallel size to {most} or less: a server cannot span two nodes."
    elif cluster.num_gpus == 1:
        advice = (
            "Use world=auto (one trainer rank, no reference servers) to let servers and trainer share the GPU, "
            "world.placement=colocated to let them alternate, or world.device=cpu."
        )
    else:
        advice = "Change the fractions, lower the parallel sizes, or use world.placement=colocated."
    return ConfigError("world", got, f"a split that fits {cluster.describe()}; it needs {', '.join(needs)}", advice)


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
        split = self._split
        servers = self._servers("actor_llm", split.actor_llms, split.actor_places, free)
        servers += self._servers("preprocessor_llm", split.preprocessor_llms, split.preprocessor_llms, free)
        if self._config.environment is not None:
            servers += self._services("environment", world.env_replicas)
        servers += self._services("verifier", world.verifier_replicas)
        clients = [self._job(kind, 0, 0, []) for kind in ("actor", "preprocessor")]
        ranks = self._ranks(self._all_gpus() if split.is_shared else free)
        jobs = [*self._with_group_ports(servers, ranks), *clients, *ranks]
        return self._with_workers(self._with_cores([job for job in jobs if self._config.has_stage(job.kind)]))

    def _all_gpus(self) -> list[list[str]]:
        """GPUs of every node, in the order of the node's list."""
        return [list(machine.gpus) for machine in self._cluster.nodes]

    def _servers(self, kind: str, count: int, places: int, free: list[list[str]]) -> list[Job]:
        """`count` servers on `places` places, the first ones on different GPUs, so that few rollouts use all GPUs."""
        taken = list[tuple[int, list[str]]]()
        if (listed := self._listed(f"{kind.removesuffix('_llm')}_gpus")) is not None:
            taken = [(0, [self._all_gpus()[0][number] for number in numbers]) for numbers in listed]
        elif self._split.device == "cuda":
            taken = [self._take(free) for _ in range(places)]
        else:
            # Backwards from the last node: the trainer is on the first ones.
            nodes = self._cluster.world_size
            taken = [(nodes - 1 - idx % nodes, []) for idx in range(count)]
        jobs = []
        for idx in range(count):
            node, gpus = taken[idx % len(taken)]
            port = self._ports.take(node, self._config.world.llm_start_port + idx, "world.llm_start_port")
            jobs.append(self._job(kind, idx, node, list(gpus), port))
        return jobs

    def _take(self, free: list[list[str]]) -> tuple[int, list[str]]:
        """The GPUs of one server, off `free`, from the first node that still has enough."""
        size = self._split.gpus_per_llm
        node = next(node for node, left in enumerate(free) if len(left) >= size)
        gpus, free[node] = free[node][:size], free[node][size:]
        return node, gpus

    def _listed(self, key: str) -> list[Any] | None:
        """The user's list of GPUs of a pool; on a CPU only its length counts."""
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
            return [self._job("finetune", i, 0, [self._all_gpus()[0][number]]) for i, number in enumerate(listed)]
        slots = [(node, gpu) for node, left in enumerate(free) for gpu in left][:count]
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
            msgspec.structs.replace(job, cores=max(1, self._cluster.nodes[job.node_rank].cores // heavy[job.node_rank]))
            if job.kind in _HEAVY_KINDS
            else job
            for job in jobs
        ]

    def _with_workers(self, jobs: list[Job]) -> list[Job]:
        """Give the actor its processes for rollouts."""
        return [
            msgspec.structs.replace(job, workers=rollout_workers(self._config, self._cluster, jobs, job))
            if job.kind == "actor"
            else job
            for job in jobs
        ]
