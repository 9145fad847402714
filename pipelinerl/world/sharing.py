"""How many servers share a GPU, and how much of its memory each one gets.

With many short sequences of a small model, vLLM's host process is the bottleneck and the GPU waits for it. Several
servers on one GPU fill those gaps. Each gets a fixed key-value cache, because measuring free memory is unreliable while
other servers start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import msgspec

from pipelinerl.config.run import BESIDE_A_RANK, RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.world.cluster import Cluster
from pipelinerl.world.forecast import least_memory, least_of_server, server_setup, trainer_memory, trainer_setup
from pipelinerl.world.jobs import Job
from pipelinerl.world.model_shape import ModelShape

#: More were not measured.
MOST_SERVERS = 4
#: What the process of the engine and the one that answers requests use.
CORES_PER_SERVER = 2
#: Of the actor, by `actor.rollout_workers=auto`; more than two were not measured.
MOST_WORKERS = 8
#: Several servers on a GPU: their weights are at most this share of its memory; weights and overhead are at most this
#: share of what they may use, the caches get the rest; each cache holds so many sequences of full length.
WEIGHT_SHARE, FIXED_SHARE, LEAST_SEQUENCES = 0.15, 0.5, 8
#: Of a server besides weights and cache: CUDA context, graphs, activations, logits.
OVERHEAD_BYTES = 3 * 2**30
#: Of a GPU, what stays free beside a trainer rank's peak and the servers there: the peak is a forecast. Where that
#: leaves too little for one sequence, the second number counts.
FREE_NEXT_TO_TRAINER, LEAST_FREE = 0.05, 0.02
#: What a cache next to a trainer holds besides all running sequences, and its size for tiny models.
PREFIX_SHARE, LEAST_CACHE_BYTES = 0.25, 2**30
_ACTOR_AND_PREPROCESSOR = 2
_CACHE = "kv-cache-memory-bytes"


@dataclass(frozen=True)
class Needs:
    """One GPU, and what a server or a trainer rank takes of it, in bytes.

    Attributes:
        gpu: memory of the GPU.
        usable: what all its servers together may use if no rank works there.
        weights: of one server.
        sequence: cache of one sequence of full length.
        sequences: that a server runs at most.
        rank: peak of a trainer rank.
        least_rank: what no step of it is possible without.
        cache: of one server, if the user chose it.
        is_counted: whether the weight files tell the number of parameters.
    """

    gpu: int
    usable: int
    weights: int
    sequence: int
    sequences: int
    rank: int
    least_rank: int
    cache: int | None
    is_counted: bool

    def room(self, with_rank: bool) -> int:
        """What all servers of the GPU may use together."""
        if not with_rank:
            return self.usable
        return min(self.usable, int((1 - FREE_NEXT_TO_TRAINER) * self.gpu) - self.rank)

    def cache_of(self, servers: int, with_rank: bool) -> int:
        """The cache of each of `servers` servers; below zero if there is no room for them. Next to a trainer no more
        than they can use well."""
        if self.cache is not None:
            return self.cache
        cache = self._cache_in(self.room(with_rank), servers)
        enough = max(int(self.sequences * self.sequence * (1 + PREFIX_SHARE)), LEAST_CACHE_BYTES)
        return min(cache, enough) if with_rank else cache

    def tight_cache_of(self, servers: int) -> int:
        """The same where almost nothing stays free next to a trainer, and one sequence at least."""
        room = min(self.usable, int((1 - LEAST_FREE) * self.gpu) - self.rank)
        return max(self.sequence, self._cache_in(room, servers))

    def _cache_in(self, room: int, servers: int) -> int:
        return room // servers - self.weights - OVERHEAD_BYTES

    def is_impossible(self, servers: int, with_rank: bool) -> bool:
        """Whether servers with less room than they should have cannot work at all."""
        is_too_much = not with_rank or self.least_rank + servers * self.weights > self.gpu
        return self.is_counted and is_too_much

    def server(self, cache: int) -> int:
        """Memory of one server with this cache."""
        return self.weights + OVERHEAD_BYTES + cache

    def on_each_of(self, gpus: int) -> Needs:
        """The same for each GPU of a parallel server."""
        return replace(self, weights=self.weights // gpus, sequence=self.sequence // gpus)


def needs_of(config: RunConfig, cluster: Cluster, model: ModelShape | None, ranks: int) -> Needs | None:
    """What servers and ranks of this run take; None if the model or the memory of the GPUs is not known.

    Args:
        ranks: of the trainer.
    """
    if model is None or cluster.gpu_bytes is None:
        return None
    server, trainer = server_setup(config, model, False), trainer_setup(config, model, ranks, False)
    return Needs(
        gpu=cluster.gpu_bytes,
        usable=int(server.share * cluster.gpu_bytes),
        weights=int(least_of_server(server)),
        sequence=int(server.max_tokens * model.kv_bytes(server.kv_bytes)),
        sequences=server.max_sequences,
        rank=int(trainer_memory(trainer).total),
        least_rank=int(least_memory(trainer)),
        cache=config.vllm_config.number(_CACHE),
        is_counted=model.source == "weight files",
    )


def free_cores(config: RunConfig, cluster: Cluster, gpus: int, ranks: int) -> int:
    """CPU cores of a node for the servers of one GPU, if `gpus` of a node have servers and `ranks` ranks are there."""
    workers = config.actor.rollout_workers
    others = _ACTOR_AND_PREPROCESSOR + (1 if workers == "auto" else workers) + ranks
    return (cluster.cores - others) // max(1, gpus)


def rollout_workers(config: RunConfig, cluster: Cluster, jobs: list[Job], actor: Job) -> int:
    """How many processes run the rollouts of `actor`, one of `jobs`."""
    if config.actor.rollout_workers != "auto":
        return config.actor.rollout_workers
    here = Counter(job.kind for job in jobs if job.node_rank == actor.node_rank)
    taken = here["finetune"] + CORES_PER_SERVER * (here["actor_llm"] + here["preprocessor_llm"])
    spare = cluster.nodes[actor.node_rank].cores - _ACTOR_AND_PREPROCESSOR - taken
    return workers_for(sum(job.kind == "actor_llm" and bool(job.gpus) for job in jobs), spare)


def workers_for(servers: int, cores: int = MOST_WORKERS) -> int:
    """Processes for the rollouts of `servers` servers on GPUs (`actor.rollout_workers=auto`), with `cores` for them.

    A process handles 1,500 to 2,400 short rollouts a second, and a server of a small model answers 600 requests.
    """
    return max(1, min(MOST_WORKERS, servers // 2, cores))


def servers_on_gpu(needs: Needs | None, cores: int, with_rank: bool) -> int:
    """How many servers to run on a GPU (`world.servers_per_gpu=auto`).

    Args:
        needs: None: not known, and then one.
        cores: for these servers.
        with_rank: a trainer rank works on the GPU at the same time.
    """
    if needs is None:
        return 1
    room = needs.room(with_rank)
    most = min(MOST_SERVERS, cores // CORES_PER_SERVER)
    while most > 1:
        cache = needs.cache_of(most, with_rank)
        if needs.cache is not None:
            fits = most * needs.server(cache) <= room
        else:
            fits = most * needs.server(0) <= FIXED_SHARE * room and cache >= LEAST_SEQUENCES * needs.sequence
        if fits and most * needs.weights <= WEIGHT_SHARE * needs.gpu:
            return most
        most -= 1
    return 1


def with_memory(config: RunConfig, jobs: list[Job], needs: Needs | None) -> tuple[list[Job], list[str]]:
    """Give a fixed cache to servers that share their GPU with each other or with a concurrent rank.

    Returns:
        The jobs, and what may not fit.

    Raises:
        ConfigError: there is no room for them, or several share a GPU whose size, or whose model's, is not known.
    """
    kinds = {"actor_llm": "server", "preprocessor_llm": "server", "finetune": "rank"}
    users = Counter((kinds[job.kind], job.node_rank, gpu) for job in jobs if job.kind in kinds for gpu in job.gpus)
    ranks_compute = config.world.placement != "colocated"  # else ranks wait until the servers sleep
    is_set = any(config.vllm_config.option(name)[1] is not None for name in (_CACHE, "gpu-memory-utilization"))
    notes = list[str]()

    def shared(job: Job) -> Job:
        if kinds.get(job.kind) != "server":
            return job
        gpus = [
            (users["server", job.node_rank, gpu], ranks_compute and users["rank", job.node_rank, gpu] > 0)
            for gpu in job.gpus
        ]
        if all(gpu == (1, False) for gpu in gpus) or (needs is None and is_set):
            return job
        if needs is None:
            if any(servers > 1 for servers, _ in gpus):
                raise _unknown_room(job)
            return msgspec.structs.replace(job, memory_share=BESIDE_A_RANK)
        own = needs.on_each_of(len(gpus))
        cache, (servers, with_rank) = min((own.cache_of(*gpu), gpu) for gpu in gpus)
        if own.cache is None and cache < own.sequence:
            fault = _no_room(config, own, servers, with_rank)
            if own.is_impossible(servers, with_rank):
                raise fault
            cache = own.tight_cache_of(servers)
            notes.append(f"servers get a cache of {_gb(cache)}, and may not fit: {fault}")
        share = min(own.server(cache), own.usable) / own.gpu
        return msgspec.structs.replace(job, cache_bytes=cache, memory_share=round(share, 4))

    return [shared(job) for job in jobs], list(dict.fromkeys(notes))


def _unknown_room(job: Job) -> ConfigError:
    return ConfigError(
        f"vllm_config.vllm_kwargs.{_CACHE}",
        None,
        f"a number of bytes, because several processes share GPU {job.gpus[0]}, and the size of the model or the "
        "GPU is not known here",
        f"Use a model that is on this machine, or set for instance vllm_config.vllm_kwargs.{_CACHE}=4294967296, and "
        "vllm_config.vllm_kwargs.gpu-memory-utilization to what has to be free when it starts, 0.2 for instance.",
    )


def _no_room(config: RunConfig, needs: Needs, servers: int, with_rank: bool) -> ConfigError:
    trainer = f"a peak of {_gb(needs.rank)}, {_gb(needs.least_rank)} without activations"
    next_to = f" next to a trainer with {trainer}" if with_rank else ""
    least = needs.server(needs.sequence)
    return ConfigError(
        "world.servers_per_gpu",
        config.world.servers_per_gpu,
        f"servers that fit a GPU of {_gb(needs.gpu)}: {servers} x {_gb(least)} (weights {_gb(needs.weights)}, cache of "
        f"one sequence {_gb(needs.sequence)}, overhead {_gb(OVERHEAD_BYTES)}) in {_gb(max(0, needs.room(with_rank)))}"
        f"{next_to}",
        "Use fewer servers, a smaller max_model_len, LoRA, or more GPUs; or fix the cache yourself by "
        f"vllm_config.vllm_kwargs.{_CACHE}.",
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
