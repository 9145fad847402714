"""`RunConfig`: the whole configuration of a run as one frozen, validated object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.config.resources import (
    STAGE_KINDS,
    STREAM_BACKENDS,
    Backend,
    DebugConfig,
    FileStreams,
    PlainSettings,
    StreamsConfig,
    SuperviseConfig,
    TensorBoardConfig,
    TrackingConfig,
    VLLMConfig,
    WandbConfig,
    WorldConfig,
    share_of,
)
from pipelinerl.config.section import LARGEST_SEED, Choice, FlatSection, Section
from pipelinerl.config.task import (
    ActorConfig,
    AgentConfig,
    EvaluationConfig,
    EvaluationParameters,
    EvaluationSet,
    LLMConfig,
    PreprocessConfig,
    RewardsConfig,
    VerifierConfig,
)


class PipelineSchedule(Section):
    """Sampling and training overlap; weights reach sequences in flight."""

    steps_per_generation: ClassVar[int] = 1
    schedule: Literal["pipeline"] = Field(
        default="pipeline",
        description="pipeline: weights reach sequences in flight; concurrent: running rollouts end before an update; "
        "conventional: alternate between generating and training",
    )
    max_lag: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="most samples in flight beyond the batch being collected; auto: two more batches, 0: on-policy, "
        "null: unbounded",
    )
    lag_policy: str = Field(
        default="adaptive",
        description="how far generation runs ahead within max_lag. adaptive: only as far as the trainer needs, so that "
        "samples stay fresh; or another policy of actor/budget.py, or the dotted path of your own (docs/schedules.md)",
    )
    pop_old_data: bool = Field(
        default=True, description="with max_lag=null, drop the oldest ready groups when training is slow"
    )


class ConcurrentSchedule(PipelineSchedule):
    """Sampling and training overlap; running rollouts end before an update."""

    schedule: Literal["concurrent"] = "concurrent"  # type: ignore[assignment]


class ConventionalSchedule(Section):
    """Generate a round, train on it, generate the next one."""

    schedule: Literal["conventional"] = "conventional"
    lag_policy: ClassVar[str] = ""
    pop_old_data: ClassVar[bool] = False
    steps_per_generation: int = Field(
        default=1, ge=1, description="optimizer steps per round; the lag is less than this"
    )


_POOLS = {
    "actor_llm": ("actor_fraction", "num_actor_llms", "actor_gpus"),
    "preprocessor_llm": ("preprocessor_fraction", "num_preprocessor_llms", "preprocessor_gpus"),
    "finetune": ("finetune_fraction", "num_finetune_ranks", "finetune_gpus"),
}
#: Part of a GPU's memory for a server that shares it with a rank, if they alternate or their sizes are not known.
BESIDE_A_RANK = 0.5
#: Evaluation samples like training unless it is told otherwise.
LIKE_TRAINING = ("max_tokens", "temperature", "stop")


class RunConfig(FlatSection):
    """Root of the configuration."""

    output_dir: str = Field(description="folder that the run writes everything to")
    model_path: str = Field(default="Qwen/Qwen2.5-7B", description="Hugging Face name or folder of the model")
    seed: int = Field(default=42, ge=0, le=LARGEST_SEED, description="seed of problem order, requests and trainer")
    attempts: int = Field(default=8, ge=1, description="rollouts per problem")
    pacing: Annotated[PipelineSchedule | ConcurrentSchedule | ConventionalSchedule, Choice("schedule", flat=True)] = (
        PipelineSchedule()
    )
    force_restart: bool = Field(default=False, description="start over in an output_dir that already holds a run")
    eval_every_n_versions: int = Field(
        default=50, ge=0, description="steps between evaluations; 0: only before and after"
    )
    train_subset: dict[str, int] | None = Field(default=None, description="{begin: B, end: E}: only these problems")
    fp32_lm_head: bool = Field(default=True, description="compute the output head in fp32, in servers and trainer")
    dataset_loader: str | None = Field(default=None, description="dotted path of the problem loader (docs/domains.md)")
    dataset_loader_params: dict[str, Any] = Field(default={}, description="further arguments of the loader")
    train_dataset_names: list[Any] = Field(default=[], description="data sets for training, passed to the loader")
    test_dataset_names: list[Any] = Field(default=[], description="held-out data sets, passed to the loader")
    eval: list[EvaluationSet] = Field(
        default=[],
        description="[{name, k, problems, temperature, top_p, top_k, max_tokens, stop}, ...]: held-out sets with k "
        "samples of each problem (of at most so many `problems`) and sampling of their own, in place of "
        "`test_llm.parameters`; a set that is not in test_dataset_names is evaluated too (docs/evaluation.md)",
    )
    environment: dict[str, Any] | None = Field(
        default=None, description="{_target_, arguments}: what environment servers serve (world.env_replicas)"
    )
    custom: dict[str, Any] = Field(default={}, description="settings of your own task (`cfg.custom`), not checked")
    actor: ActorConfig = ActorConfig()
    agent: AgentConfig = AgentConfig()
    preprocess: PreprocessConfig = PreprocessConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    backend: Backend = PlainSettings()
    llm: LLMConfig = LLMConfig()
    test_llm: EvaluationConfig = EvaluationConfig()
    vllm_config: VLLMConfig = VLLMConfig()
    world: WorldConfig = WorldConfig()
    streams: Annotated[StreamsConfig, Choice("backend", names=tuple(STREAM_BACKENDS))] = FileStreams()
    rewards: RewardsConfig = RewardsConfig()
    verifier: VerifierConfig = VerifierConfig()
    sandbox_endpoint: str | None = Field(
        default=None, description="SandboxFusion server; null: SANDBOX_ENDPOINT, else local"
    )
    supervise: SuperviseConfig = SuperviseConfig()
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    tracking: TrackingConfig = TrackingConfig()
    debug: DebugConfig = DebugConfig()
    dry_run: bool = Field(default=False, description="print the plan and start nothing")

    @field_validator("dataset_loader_params", mode="before")
    @classmethod
    def _null_clears(cls, value: Any) -> Any:
        """`null` clears what an included file set: YAML has no other way to empty a mapping."""
        return {} if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _evaluate_like_training(cls, data: Any) -> Any:
        """Fill in what `test_llm.parameters` does not say from `llm.parameters`."""
        if not isinstance(data, Mapping):
            return data
        training, evaluation = _parameters(data.get("llm")), _parameters(data.get("test_llm"))
        if training is None or evaluation is None:
            return data
        followed = {key: training[key] for key in LIKE_TRAINING if key in training}
        if not followed:
            return data
        return {**data, "test_llm": {**(data.get("test_llm") or {}), "parameters": {**followed, **evaluation}}}

    def has_stage(self, kind: str) -> bool:
        """Whether jobs of that kind are part of `debug.mode`."""
        return kind in STAGE_KINDS[self.debug.mode]

    @property
    def sends_weights(self) -> bool:
        """Whether the servers get new weights in the course of training."""
        return not self.debug.mode

    def of_stage(self) -> RunConfig:
        """The configuration of the stages that `debug.mode` names, which the launcher takes before anything else looks
        at it: the others get no devices. Servers of an open loop are not started again: nobody has their first weights
        any more."""
        mode = self.debug.mode
        if not mode:
            return self
        world: dict[str, Any] = {}
        for kind, (fraction, count, gpus) in _POOLS.items():
            if not self.has_stage(kind):
                world |= {fraction: 0.0, count: None, gpus: None}
        changes: dict[str, Any] = {"world": self.world.model_copy(update=world)}
        if mode == "evaluation":  # an evaluation that was interrupted goes on with what is recorded
            changes["actor"] = self.actor.model_copy(update={"recorded_test_samples": None})
        if mode == "open_loop":
            changes["supervise"] = self.supervise.model_copy(update={"max_server_restarts": 0})
        return self.model_copy(update=changes)

    @property
    def plain_test_names(self) -> list[Any]:
        """Names of held-out sets without sampling of their own."""
        own = [each.name for each in self.eval]
        return [name for name in self.test_dataset_names if name not in own]

    @property
    def is_evaluated(self) -> bool:
        """Whether there are held-out problems."""
        return bool(self.test_dataset_names or self.eval)

    @property
    def evaluation_parameters(self) -> list[EvaluationParameters]:
        """Sampling of held-out problems by `Problem.evaluation_set`: of `plain_test_names`, then of each of `eval`."""
        return [self.test_llm.parameters, *(each.parameters(self.test_llm.parameters) for each in self.eval)]

    @property
    def schedule(self) -> str:
        return self.pacing.schedule

    @property
    def max_lag(self) -> int | None:
        """None: unbounded, or the rounds of `schedule=conventional` bound the lag."""
        if isinstance(self.pacing, ConventionalSchedule):
            return None
        return 2 * self.finetune.samples_per_step if self.pacing.max_lag == "auto" else self.pacing.max_lag

    @property
    def gpu_memory_share(self) -> float:
        """Part of a GPU's memory that a server may use: `gpu-memory-utilization`. 0.9 by default, or `BESIDE_A_RANK`
        with `world.placement=colocated`, where the trainer's weights stay on the GPU."""
        default = BESIDE_A_RANK if self.world.placement == "colocated" else 0.9
        return share_of(self.vllm_config.option("gpu-memory-utilization")[1]) or default

    @property
    def lag_policy(self) -> str:
        """What decides how far generation runs ahead; empty: the rounds of `schedule=conventional`."""
        return self.pacing.lag_policy

    @property
    def pop_old_data(self) -> bool:
        """Whether the oldest ready batches are dropped when training is slow."""
        return self.pacing.pop_old_data

    @property
    def steps_per_generation(self) -> int:
        """Optimizer steps per round; 1 where there are no rounds."""
        return self.pacing.steps_per_generation

    @property
    def has_reference_pool(self) -> bool:
        """Whether the world is asked for servers of the reference model."""
        servers = self.world.num_preprocessor_llms
        return self.world.preprocessor_fraction > 0 if servers is None else servers > 0

    def uses_local_reference(self, has_servers: bool) -> bool:
        """Whether KL, in the loss or in the reward, compares with a frozen model next to the trainer.

        Args:
            has_servers: the world has servers of the reference model.
        """
        rl = self.finetune.rl
        wanted = rl.reference == "local" or (rl.reference == "auto" and not has_servers)
        return wanted and rl.needs_reference

    @property
    def sampling_temperature(self) -> float:
        """Temperature at which trainer and servers compute log-probs in training."""
        return self.llm.parameters.temperature


def _parameters(section: Any) -> Mapping[str, Any] | None:
    """`parameters` of a section in plain data; None: it is no plain data."""
    if section is None:
        return {}
    parameters = section.get("parameters", {}) if isinstance(section, Mapping) else None
    return parameters if isinstance(parameters, Mapping) else None
