"""Config sections of everything but the trainer: servers, actor, preprocessor, world, streams, tracking, debug."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipelinerl.config.base import Section

Device = Literal["auto", "cpu", "cuda"]


class LLMParameters(Section):
    """Sampling parameters of training (`llm`): whole distributions only, because the trainer assumes them."""

    max_tokens: int = Field(default=8192, ge=1)
    temperature: float = Field(default=1.0, ge=0, description="0: greedy, in evaluation only")
    min_tokens: int = Field(default=0, ge=0)
    stop: list[str] = []
    ignore_eos: bool = False


class EvaluationParameters(LLMParameters):
    """Sampling parameters of evaluation (`test_llm`)."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, description="-1 or 0: all tokens")


class LLMConfig(Section):
    parameters: LLMParameters = LLMParameters()


class EvaluationConfig(Section):
    parameters: EvaluationParameters = EvaluationParameters()


class VLLMConfig(Section):
    """`vllm_kwargs` go to vLLM's command line untouched: `{"max_model_len": 4096, "enforce-eager": ""}`."""

    quantization: str | None = None
    vllm_kwargs: dict[str, Any] = {}
    kv_cache: Literal["keep", "recompute"] = "keep"
    start_timeout_s: float = Field(default=900, gt=0)
    cpu_kv_cache_gib: float = Field(default=1, gt=0)


class Example(Section):
    """A question and its answer, shown before the task as an earlier turn of the dialogue."""

    task: str
    answer: str


class ActorConfig(Section):
    """The rollout side. `rollout_policy` is the dotted path of `generate_rollout`."""

    rollout_policy: str | None = None
    llm_max_rollouts: int = Field(default=64, ge=1, description="concurrent rollouts per server")
    rollout_workers: int = Field(default=1, ge=1)
    discount_factor: float = Field(default=1.0, gt=0, le=1)
    throughput_window_size: int = Field(default=50, ge=1)
    log_each_n_secs: float = Field(default=0, ge=0)
    rollout_timeout_s: float = Field(default=600, gt=0)
    request_timeout_s: float = Field(default=300, gt=0)
    max_retries: int = Field(default=3, ge=0, description="attempts after the first for a transient failure")
    max_failure_rate: float = Field(default=0.5, gt=0, le=1)
    min_rollouts_for_failure_rate: int = Field(default=32, ge=1)
    test_samples: int | None = Field(default=None, ge=1, description="held-out rollouts per evaluation; null: one each")
    recorded_test_samples: int | None = Field(default=100, ge=0, description="rollouts kept; 0: none, null: all")
    evaluation_concurrency: int | None = Field(default=None, ge=1)
    agent_func_path: str | None = None
    system_prompt: str | None = None
    task_template: str | None = None
    task_prompt: str | None = None
    examples: list[Example] = []


class PreprocessConfig(Section):
    chunk_n_groups: int = Field(default=2, ge=1)
    ring_buffer_size: int = Field(default=128, ge=1, description="batches kept when training is slow, drop-oldest")


#: Lists of GPUs by pool, and the keys of the counts that follow from them.
GPU_LISTS = {
    "actor_gpus": "num_actor_llms",
    "preprocessor_gpus": "num_preprocessor_llms",
    "finetune_gpus": "num_finetune_ranks",
}
#: A GPU by its place among those that the launcher sees.
GpuNumber = Annotated[int, Field(ge=0)]


class WorldConfig(Section):
    """How the cluster is split. Fractions share the GPUs; the `num_*` keys, if set, say the counts outright (and are
    the way to split a machine without GPUs)."""

    actor_fraction: float = Field(default=4, ge=0)
    preprocessor_fraction: float = Field(default=0, ge=0)
    finetune_fraction: float = Field(default=4, ge=0)
    num_actor_llms: int | None = Field(default=None, ge=1)
    num_preprocessor_llms: int | None = Field(default=None, ge=0)
    num_finetune_ranks: int | None = Field(default=None, ge=1)
    actor_gpus: list[list[GpuNumber]] | None = Field(default=None, min_length=1)
    preprocessor_gpus: list[list[GpuNumber]] | None = None
    finetune_gpus: list[GpuNumber] | None = Field(default=None, min_length=1)
    device: Device = "auto"
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    sleep_level: Literal["auto", "1", "2"] = "auto"
    offload_optimizer: bool = False
    env_replicas: int = Field(default=0, ge=0)
    verifier_replicas: int = Field(default=0, ge=0)
    actor_group_port: int = Field(default=9000, ge=1024, le=65535)
    environment_start_port: int = Field(default=7777, ge=1024, le=65535)
    llm_start_port: int = Field(default=8080, ge=1024, le=65535)
    node_port: int = Field(default=29400, ge=1024, le=65535)

    @model_validator(mode="before")
    @classmethod
    def _count_lists(cls, data: Any) -> Any:
        """Lists of GPUs say the counts as well, and win over them: some of the shipped worlds have counts."""
        if not isinstance(data, dict):
            return data
        # An empty list is refused by itself, in words about it and not about a count that nobody set.
        lists = {key: data[key] for key in GPU_LISTS if isinstance(data.get(key), list) and data[key]}
        return data | {GPU_LISTS[key]: len(gpus) for key, gpus in lists.items()}


class StreamsConfig(Section):
    backend: Literal["files", "redis"] = "files"
    fsync: Literal["never", "interval", "always"] = "never"
    shard_bytes: int = Field(default=256 * 2**20, ge=1)
    url: str | None = None
    byte_budget: int = Field(default=2 * 2**30, ge=1)
    retention: Literal["all", "heads"] = "all"
    backpressure_timeout_s: float = Field(default=600, gt=0)


class WandbConfig(Section):
    use_wandb: bool = True
    mode: Literal["online", "offline", "disabled"] = "offline"
    wandb_id: str | None = None
    wandb_name: str | None = None
    wandb_entity_name: str | None = None
    wandb_project_name: str = "pipelinerl"
    wandb_resume: Literal["allow", "must", "never", "auto"] = "allow"
    wandb_use_basename: bool = True
    wandb_workspace_root: str = "results"
    wandb_group: str | None = None
    wandb_dir: str | None = None
    tags: list[str] = []


class TensorBoardConfig(Section):
    enabled: bool = False
    folder: str | None = None


class DebugConfig(Section):
    mode: Literal["", "actor", "preprocessor", "finetune", "open_loop", "finetune+preprocessor"] = ""
    streams_from: str | None = None


class SuperviseConfig(Section):
    """Deadlines of the supervisor, in seconds."""

    heartbeat_interval_s: float = Field(default=2, gt=0)
    heartbeat_timeout_s: float = Field(default=25, gt=0)
    progress_timeout_s: float = Field(default=1800, gt=0)
    shutdown_grace_s: float = Field(default=10, gt=0)
    finish_timeout_s: float = Field(default=600, gt=0)
    weight_sync_timeout_s: float = Field(default=120, gt=0)
    probe_every_n_updates: int = Field(default=0, ge=0, description="0: the first one behind a start, and the last")
    nodes_timeout_s: float = Field(default=900, gt=0)
    max_restarts: int = Field(default=0, ge=0)
    max_server_restarts: int = Field(default=3, ge=0, description="of one server, within server_restart_window_s")
    server_restart_window_s: float = Field(default=3600, gt=0)
    server_restart_backoff_s: float = Field(default=1, ge=0)


class FSDPConfig(Section):
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"


class RewardsConfig(Section):
    """Reward of one answer, for the tasks that judge answers: the weighted sum of `components`.

    The eight numbers are the component `outcome`: reward by the kind of answer. `finished`: the model ended by itself.
    """

    name: str = "pure_success"
    components: dict[str, float] = {"outcome": 1.0}
    correct_answer_finished: float = 1.0
    correct_answer_not_finished: float = 0.0
    wrong_answer_finished: float = 0.0
    wrong_answer_not_finished: float = 0.0
    no_answer_finished: float = 0.0
    no_answer_not_finished: float = 0.0
    unparsable_finished: float = 0.0
    unparsable_not_finished: float = 0.0
    buffer_tokens: int = Field(default=0, ge=0)
    easy_tokens: int = Field(default=256, ge=1)


class VerifierConfig(Section):
    """Grader processes: of one verifier service, or of one rollout worker where there is no service."""

    processes: int = Field(default=2, ge=1)
    timeout_s: float = Field(default=10, gt=0)
    memory_mib: int = Field(default=2048, ge=256)
    queue_timeout_s: float = Field(default=300, gt=0)
    max_queue: int = Field(default=8192, ge=1)
