"""`RunConfig`: the whole configuration of a run as one frozen, validated object. Composes sections, no policy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from pipelinerl.config.agent import AgentConfig
from pipelinerl.config.base import LARGEST_SEED, Section
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.config.sections import (
    ActorConfig,
    DebugConfig,
    EvaluationConfig,
    FSDPConfig,
    LLMConfig,
    PreprocessConfig,
    RewardsConfig,
    StreamsConfig,
    SuperviseConfig,
    TensorBoardConfig,
    VerifierConfig,
    VLLMConfig,
    WandbConfig,
    WorldConfig,
)


class RunConfig(Section):
    """Root of the configuration. `output_dir` is the run directory, `model_path` a Hugging Face folder or name."""

    output_dir: str
    model_path: str = "Qwen/Qwen2.5-7B"
    seed: int = Field(default=42, ge=0, le=LARGEST_SEED)
    attempts: int = Field(default=8, ge=1)
    max_lag: int | None = Field(default=None, ge=0)
    pop_old_data: bool = True
    force_restart: bool = False
    eval_every_n_versions: int = Field(default=50, ge=0, description="optimizer steps; 0: before and after training")
    train_subset: dict[str, int] | None = None
    schedule: Literal["pipeline", "concurrent", "conventional"] = "pipeline"
    steps_per_generation: int = Field(default=1, ge=1)
    fp32_lm_head: bool = True
    dataset_loader: str | None = None
    dataset_loader_params: dict[str, Any] = {}
    train_dataset_names: list[Any] = []
    test_dataset_names: list[Any] = []
    environment: dict[str, Any] | None = None
    custom: dict[str, Any] = {}
    actor: ActorConfig = ActorConfig()
    agent: AgentConfig = AgentConfig()
    preprocess: PreprocessConfig = PreprocessConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    llm: LLMConfig = LLMConfig()
    test_llm: EvaluationConfig = EvaluationConfig()
    vllm_config: VLLMConfig = VLLMConfig()
    world: WorldConfig = WorldConfig()
    streams: StreamsConfig = StreamsConfig()
    rewards: RewardsConfig = RewardsConfig()
    verifier: VerifierConfig = VerifierConfig()
    sandbox_endpoint: str | None = None
    supervise: SuperviseConfig = SuperviseConfig()
    use_deepspeed: bool = False
    deepspeed_config: str = "deepspeed_stage3_bf16"
    use_fsdp: bool = False
    fsdp: FSDPConfig = FSDPConfig()
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    debug: DebugConfig = DebugConfig()
    dry_run: bool = False

    @field_validator("dataset_loader_params", mode="before")
    @classmethod
    def _null_clears(cls, value: Any) -> Any:
        """`null` clears what an included file set: YAML has no other way to empty a mapping."""
        return {} if value is None else value

    @property
    def has_reference_pool(self) -> bool:
        """Whether the world is asked for servers of the reference model."""
        servers = self.world.num_preprocessor_llms
        return self.world.preprocessor_fraction > 0 if servers is None else servers > 0

    def uses_local_reference(self, has_servers: bool) -> bool:
        """Whether KL, in the loss or in the reward, compares with a frozen model beside the trainer.

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
