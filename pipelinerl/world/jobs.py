"""`Job` and `WorldMap`: the plan of a run as plain data, saved as JSON in the run directory."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

SERVER_KINDS = ("actor_llm", "preprocessor_llm", "environment", "verifier")


class Transport(NamedTuple):
    """A way to send weights to servers.

    Attributes:
        ends: where its `Ends` are (weights/transport.py): `module:NAME`.
        on_cpu: whether its servers compute on CPUs.
    """

    ends: str
    on_cpu: bool = False


#: How weights reach a server: on a CPU, on another GPU, on the trainer's GPU.
CPU_TRANSPORT, GPU_TRANSPORT, SAME_GPU_TRANSPORT = "gloo", "nccl", "ipc"
#: All of them. Runs choose by `WorldMap.transport_to`.
TRANSPORTS = {
    CPU_TRANSPORT: Transport("pipelinerl.weights.transport:GLOO", on_cpu=True),
    GPU_TRANSPORT: Transport("pipelinerl.weights.transport:NCCL"),
    SAME_GPU_TRANSPORT: Transport("pipelinerl.weights.ipc:IPC"),
}


def transport_named(name: str) -> Transport:
    """A transport by its name. ValueError: there is none."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport: got {name!r}, expected one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


#: Variables with the settings of PyTorch's allocator; the first one that is set counts, even if it is empty.
ALLOCATOR_KEYS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Job(msgspec.Struct, frozen=True):
    """One process of the run.

    `idx` counts within the kind, `local_idx` within kind and node (the local rank of a trainer process). `gpus` are the
    device ids as `CUDA_VISIBLE_DEVICES` on the job's node writes them; empty on CPUs. `port` and `url` are
    those of a server; `weight_group_port` is where the trainer meets this server to send weights. `cores` is the number
    of CPU threads that the job may use. A server that shares its GPU may use `memory_share` of its memory (None: as
    configured) and has a key-value cache of `cache_bytes` (None: what its weights leave of that). The actor runs
    rollouts in `workers` processes.
    """

    kind: str
    name: str
    idx: int
    local_idx: int
    node_rank: int
    host: str
    gpus: list[str]
    port: int | None
    url: str | None
    weight_group_port: int | None
    cores: int
    cache_bytes: int | None = None
    memory_share: float | None = None
    workers: int = 1


class WorldMap(msgspec.Struct, frozen=True):
    """All jobs of a run and what they share. `jobs` is in start order: servers first, trainer ranks last. `notes` list
    automatic decisions."""

    jobs: list[Job]
    device: Literal["cpu", "cuda"]
    world_size: int
    master_addr: str
    master_port: int
    notes: list[str] = []

    def jobs_of(self, kind: str) -> list[Job]:
        """Jobs of one kind in the order of `idx`."""
        return [job for job in self.jobs if job.kind == kind]

    def job(self, name: str) -> Job:
        """The job of that name; KeyError with all names if there is none."""
        for job in self.jobs:
            if job.name == name:
                return job
        raise KeyError(f"no job {name!r} in this world; there are {', '.join(job.name for job in self.jobs)}")

    def transport_to(self, server: Job) -> str:
        """How trainer rank 0 sends weights to `server`. Two processes on one GPU share memory: NCCL refuses them."""
        if self.device == "cpu":
            return CPU_TRANSPORT
        first_rank = self.jobs_of("finetune")[:1]
        shared = {gpu for rank in first_rank if rank.node_rank == server.node_rank for gpu in rank.gpus}
        return GPU_TRANSPORT if shared.isdisjoint(server.gpus) else SAME_GPU_TRANSPORT

    @property
    def num_finetune_ranks(self) -> int:
        return len(self.jobs_of("finetune"))

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> WorldMap:
        """Read what `to_json` wrote; msgspec.ValidationError if it is something else."""
        return msgspec.json.decode(text, type=cls)
