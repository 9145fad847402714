"""Sections of what a run uses: `vllm_config`, `world`, `backend`, `streams`, `supervise`, trackers, `debug`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipelinerl.config.section import Choice, FlatSection, Section

#: What vLLM takes after a number: decimal factors in lower case, binary ones in upper case.
_SUFFIXES = {
    letter: base**power for base, letters in ((1000, "kmgt"), (1024, "KMGT")) for power, letter in enumerate(letters, 1)
}
_NUMBER = re.compile(r"[0-9]+([KMGT]|(\.[0-9]+)?[kmgt])?")


def share_of(value: object) -> float | None:
    """`value` or its text as a number above 0, at most 1; None if it is not one."""
    try:
        share = float(str(value))
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


class VLLMConfig(Section):
    vllm_kwargs: dict[str, Any] = Field(default={}, description='options of vLLM without dashes; "": a bare flag')
    kv_cache: Literal["keep", "recompute"] = Field(
        default="keep", description="what happens to the key-value cache of running sequences at an update"
    )
    start_timeout_s: float = Field(default=900, gt=0, description="time limit for a server to become ready")
    cpu_kv_cache_gib: float = Field(default=1, gt=0, description="key-value cache of a server without a GPU, in GiB")

    def option(self, name: str) -> tuple[str, Any]:
        """Key and value of a server option, however it is spelled; the value is None if it is not set."""
        for key, value in self.vllm_kwargs.items():
            if key.lstrip("-").replace("_", "-") == name:
                return f"vllm_config.vllm_kwargs.{key}", value
        return f"vllm_config.vllm_kwargs.{name}", None

    def number(self, name: str) -> int | None:
        """A server option as a whole number (`4g`, `10k` as vLLM reads them); None if it is not set or not one."""
        text = str(self.option(name)[1]).strip()
        if not _NUMBER.fullmatch(text):
            return None
        factor = _SUFFIXES.get(text[-1])
        return int(text) if factor is None else int(float(text[:-1]) * factor)


class PlainSettings(Section):
    """Every rank holds the whole model; gradients are averaged."""

    type: Literal["plain"] = Field(default="plain", description="how ranks share the model: plain, deepspeed or fsdp")


class DeepSpeedSettings(Section):
    """DeepSpeed ZeRO, stage 1 to 3."""

    type: Literal["deepspeed"] = "deepspeed"
    config: str = Field(default="deepspeed_stage3_bf16", description="name of a file in conf/deepspeed, or a path")


class FSDPSettings(Section):
    """FSDP2: parameters, gradients and optimizer state are sharded over the ranks."""

    type: Literal["fsdp"] = "fsdp"
    param_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of gathered parameters")
    reduce_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of gradient reduction")


Backend = Annotated[PlainSettings | DeepSpeedSettings | FSDPSettings, Choice("type")]


class Disaggregated(Section):
    """Servers and trainer work at the same time."""

    placement: Literal["disaggregated"] = Field(
        default="disaggregated", description="colocated: servers and trainer alternate on the same GPUs"
    )


class Colocated(Section):
    """Servers and trainer alternate on the same GPUs."""

    placement: Literal["colocated"] = "colocated"
    sleep_level: Literal["auto", "1", "2"] = Field(
        default="auto", description="weights of a sleeping server: 1 in host memory, 2 dropped; auto: 1 if they fit"
    )
    offload_optimizer: bool = Field(
        default=False, description="keep the optimizer state in host memory while servers generate (plain backend)"
    )


#: Lists of GPUs by pool, and the keys of the counts that follow from them.
GPU_LISTS = {
    "actor_gpus": "num_actor_llms",
    "preprocessor_gpus": "num_preprocessor_llms",
    "finetune_gpus": "num_finetune_ranks",
}
#: A GPU by its place among those that the launcher sees.
GpuNumber = Annotated[int, Field(ge=0)]


class NodeSize(Section):
    """A machine of a cluster."""

    gpus: int = Field(ge=0, description="GPUs to use on it")
    cores: int | None = Field(default=None, ge=1, description="CPU cores, for a plan; null: as many as here")


class WorldConfig(FlatSection):
    """How the cluster is split. Fractions share the GPUs; the `num_*` keys, if set, say the counts outright (and are
    the way to split a machine without GPUs)."""

    actor_fraction: float = Field(default=4, ge=0, description="share of the GPUs for the servers that sample")
    preprocessor_fraction: float = Field(default=0, ge=0, description="share of the GPUs for the reference model")
    finetune_fraction: float = Field(default=4, ge=0, description="share of the GPUs for the trainer")
    servers_per_gpu: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="servers on each GPU of the actor's share; auto: up to 4, by weights, context, memory and cores. "
        "A count in num_actor_llms is one of servers: with auto each has a GPU of its own, else they fill GPUs. "
        "Lists in actor_gpus place every server. Without GPUs it does nothing",
    )
    mps: bool = Field(
        default=True,
        description="processes that share a GPU compute at the same time, by an MPS daemon of the run, where "
        "nvidia-cuda-mps-control is installed and no daemon runs yet; false: they take turns",
    )
    num_actor_llms: int | None = Field(
        default=None, ge=1, description="number of servers that sample, instead of a share"
    )
    num_preprocessor_llms: int | None = Field(default=None, ge=0, description="reference servers, instead of a share")
    num_finetune_ranks: int | None = Field(default=None, ge=1, description="trainer ranks, instead of a share")
    actor_gpus: list[list[GpuNumber]] | None = Field(
        default=None,
        min_length=1,
        description="GPUs of each server, such as [[0], [1]], instead of a share; one node only",
    )
    preprocessor_gpus: list[list[GpuNumber]] | None = Field(default=None, description="GPUs of each reference server")
    finetune_gpus: list[GpuNumber] | None = Field(
        default=None, min_length=1, description="GPU of each rank, such as [2, 3]"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there are GPUs")
    sharing: Annotated[Disaggregated | Colocated, Choice("placement", flat=True)] = Disaggregated()
    env_replicas: int = Field(default=0, ge=0, description="number of environment servers (see `environment`)")
    verifier_replicas: int = Field(default=0, ge=0, description="verifier servers; 0: each rollout worker grades")
    actor_group_port: int = Field(default=9000, ge=1024, le=65535, description="first port of weight updates")
    environment_start_port: int = Field(default=7777, ge=1024, le=65535, description="first port of environments")
    llm_start_port: int = Field(default=8080, ge=1024, le=65535, description="first port of vLLM servers")
    cluster: Literal["auto", "ray"] = Field(
        default="auto",
        description="ray: the Ray cluster of RAY_ADDRESS; auto: this machine, or all on which the same command was "
        "started (WORLD_SIZE above 1), as a Ray cluster of their own",
    )
    nodes: list[NodeSize] | None = Field(
        default=None,
        min_length=1,
        description="machines of the cluster, as [{gpus: 8}, {gpus: 4}]: a dry run plans for them, a run waits for "
        "them; null: all that are there",
    )
    node_port: int = Field(default=29400, ge=1024, le=65535, description="port of the Ray cluster that the nodes start")

    @property
    def placement(self) -> str:
        return self.sharing.placement

    @property
    def colocated(self) -> Colocated | None:
        """How servers and trainer share GPUs; None: they do not."""
        return self.sharing if isinstance(self.sharing, Colocated) else None

    @model_validator(mode="before")
    @classmethod
    def _count_lists(cls, data: Any) -> Any:
        """Lists of GPUs say the counts as well, and win over them: some of the shipped worlds have counts."""
        if not isinstance(data, dict):
            return data
        # An empty list is refused under its own key.
        lists = {key: data[key] for key in GPU_LISTS if isinstance(data.get(key), list) and data[key]}
        return data | {GPU_LISTS[key]: len(gpus) for key, gpus in lists.items()}


class FileStreams(Section):
    """Streams in files below output_dir/streams: for one machine, or a shared disk."""

    backend: Literal["files"] = Field(default="files", description="files, redis, or a module with a class Streams")
    fsync: Literal["never", "interval", "always"] = Field(
        default="never",
        description="never: survives a crash of the process, not a power cut; interval, always: both",
    )
    shard_bytes: int = Field(default=256 * 2**20, ge=1, description="size at which a new file is started")
    retention: Literal["all", "heads"] = Field(
        default="all", description="heads: remove tokens that no resume needs (those steps cannot be replayed)"
    )


class RedisStreams(FileStreams):
    """Streams in Redis; records that were read move to files."""

    backend: Literal["redis"] = "redis"  # type: ignore[assignment]
    url: str | None = Field(
        default=None,
        description="address of your own server; null: that of PIPELINERL_REDIS_URL (environment, it may hold a "
        "password), else the launcher starts one",
    )
    byte_budget: int = Field(default=2 * 2**30, ge=1, description="memory for the run's streams in Redis, in bytes")
    backpressure_timeout_s: float = Field(default=600, gt=0, description="how long a writer waits on a full stream")


class CustomStreams(FileStreams):
    """A backend of the user's: a module with a class `Streams`, a `StreamBackend` (streams/base.py)."""

    backend: str  # type: ignore[assignment]
    options: dict[str, Any] = Field(default={}, description="settings of your own backend, not checked")


StreamsConfig = FileStreams | RedisStreams | CustomStreams

# Backends that come with pipelinerl: `module:class`. One without keys of its own needs no type above.
STREAM_BACKENDS = {
    "files": "pipelinerl.streams.files:FileBackend",
    "redis": "pipelinerl.streams.redis:RedisBackend",
}


class SuperviseConfig(Section):
    """Deadlines of the supervisor, in seconds."""

    heartbeat_interval_s: float = Field(default=2, gt=0, description="time between heartbeats")
    heartbeat_timeout_s: float = Field(
        default=25, gt=0, description="a process that is silent for longer ends the run (300 s while it uses the CPU)"
    )
    progress_timeout_s: float = Field(default=1800, gt=0, description="a run without progress for longer ends")
    shutdown_grace_s: float = Field(default=10, gt=0, description="time for the trainer to save after SIGTERM")
    finish_timeout_s: float = Field(default=600, gt=0, description="time for the last evaluation and the shutdown")
    weight_sync_timeout_s: float = Field(default=120, gt=0, description="time limit of a weight update")
    probe_every_n_updates: int = Field(
        default=0,
        ge=0,
        description="compare log-probs of trainer and servers after every n-th weight update, and end the run if they "
        "differ; 0: after the first update of a start and the last",
    )
    nodes_timeout_s: float = Field(
        default=900, gt=0, description="how long nodes wait for each other at a start or resume"
    )
    max_restarts: int = Field(
        default=0,
        ge=0,
        description="automatic resumes after the trainer, actor or preprocessor died, or a node was lost",
    )
    max_server_restarts: int = Field(
        default=3, ge=0, description="restarts of one server per hour; one more ends the run"
    )
    server_restart_backoff_s: float = Field(
        default=1,
        ge=0,
        description="wait before the first restart of a server; doubles with each further one, up to 60 s",
    )


class WandbConfig(Section):
    mode: Literal["online", "offline", "disabled"] = Field(
        default="offline",
        description="online needs WANDB_API_KEY; offline writes files that `wandb sync` uploads; disabled: no W&B",
    )
    wandb_id: str | None = Field(default=None, description="W&B id; null: derived from the run's id")
    wandb_name: str | None = Field(default=None, description="W&B name; null: the last part of output_dir")
    wandb_entity_name: str | None = Field(default=None, description="W&B team")
    wandb_project_name: str = Field(default="pipelinerl", description="W&B project")
    wandb_group: str | None = Field(default=None, description="W&B group")
    tags: list[str] = Field(default=[], description="W&B tags")


class TensorBoardConfig(Section):
    enabled: bool = Field(default=False, description="write output_dir/tensorboard; needs the extra `tensorboard`")


class TrackingConfig(Section):
    sinks: list[str] = Field(default=[], description="dotted paths of your own sinks of metrics (docs/metrics.md)")
    prometheus_port: int | None = Field(default=None, ge=1, le=65535, description="loopback port for Prometheus")
    trackio_project: str | None = Field(
        default=None,
        min_length=1,
        description="project of Trackio that gets the numbers, on this machine; needs the extra `trackio`",
    )
    rollouts_per_evaluation: int = Field(
        default=16,
        ge=0,
        description="rollouts of an evaluation, for each data set, that W&B, Trackio and your own classes get as a "
        "table; 0: none, no text of the model leaves the run's folder",
    )


_ALL_KINDS = ("actor_llm", "preprocessor_llm", "environment", "verifier", "actor", "preprocessor", "finetune")
#: Kinds of jobs by `debug.mode`.
STAGE_KINDS: dict[str, tuple[str, ...]] = {
    "": _ALL_KINDS,
    "open_loop": _ALL_KINDS,
    "actor": ("actor_llm", "environment", "verifier", "actor"),
    "evaluation": ("actor_llm", "environment", "verifier", "actor"),
    "preprocessor": ("preprocessor_llm", "preprocessor"),
    "finetune": ("finetune",),
}
#: Modes that read what another run wrote (`debug.streams_from`).
READING_MODES = ("preprocessor", "finetune")


class DebugConfig(Section):
    mode: Literal["", "actor", "evaluation", "preprocessor", "finetune", "open_loop"] = Field(
        default="",
        description="run stages alone; evaluation: no training (`python -m pipelinerl eval`); open_loop: all, but "
        "servers keep their first weights",
    )
    streams_from: str | None = Field(
        default=None, description="output_dir of the run whose streams are read, if mode is preprocessor or finetune"
    )
