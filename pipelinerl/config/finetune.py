"""Section `finetune`: the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.config.section import Section


class LoraConfig(Section):
    enabled: bool = Field(default=False, description="train a low-rank adapter; the model itself stays frozen")
    r: int = Field(default=16, ge=1, description="rank of the adapter")
    alpha: float = Field(default=16, gt=0, description="the adapter is scaled by alpha / r")
    bias: Literal["none", "all", "lora_only"] = Field(default="none", description="biases to train as well")
    target_modules: list[str] = Field(default=[], description="linear layers with an adapter; empty: all but experts")
    adapter_path: str | None = Field(
        default=None,
        description="folder of a PEFT adapter of model_path that training starts from, with its r, alpha, bias and "
        "target_modules; null: a new adapter",
    )
    sync: Literal["merged", "adapter"] = Field(
        default="merged", description="what updates send: merged weights or the adapter"
    )

    @property
    def sends_adapter(self) -> bool:
        """Whether updates send only the adapter, to servers that hold the frozen model."""
        return self.enabled and self.sync == "adapter"


class FinetuneConfig(Section):
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="beta1 of AdamW")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="beta2 of AdamW")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="epsilon of AdamW")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of AdamW")
    dtype: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        default="auto", description="precision of matrix products (parameters stay fp32); auto: bf16 on GPUs, else fp32"
    )
    attn_implementation: Literal["auto", "flash_attention_2", "segments", "flex_attention", "sdpa", "eager"] = Field(
        default="auto",
        description="auto: the fastest for the model; segments: PyTorch's causal attention, one sample at a time",
    )
    lora: LoraConfig = LoraConfig()
    train_batch_size: int = Field(
        default=1,
        ge=1,
        description="with gradient_accumulation_passes, samples per step; without seq_packing, rows of a micro-batch",
    )
    gradient_accumulation_passes: int = Field(
        default=1024, ge=1, description="samples per step, over all ranks (times train_batch_size)"
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    gradient_clipping_threshold: float | None = Field(
        default=0.3, gt=0, description="clip gradients to this norm; null: off"
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = Field(
        default="cosine", description="schedule of the learning rate"
    )
    num_warmup_steps: int = Field(default=50, ge=0, description="steps over which the learning rate rises to its peak")
    gradient_checkpointing: bool = Field(default=True, description="recompute activations: less memory, more time")
    max_train_steps: int = Field(default=1000, ge=1, description="optimizer steps of the run, and of the schedule")
    max_epochs: int | None = Field(default=None, ge=1, description="end after this many passes over the problems")
    stop_at_success: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="end training once an evaluation reaches this success_rate over all test data; null: no limit",
    )
    interrupt_train_steps: int = Field(
        default=-1, ge=-1, description="stop early, without changing the schedule; -1: off"
    )
    seq_length: int = Field(
        default=12000,
        ge=2,
        description="most tokens in a packed micro-batch (a shared one may count as an eighth) and in a sample",
    )
    seq_packing: bool = Field(default=True, description="pack several samples into one row")
    share_prefixes: bool = Field(
        default=True,
        description="compute a prefix that samples of a row have in common, such as their prompt, only once",
    )
    logprob_chunk_tokens: int = Field(
        default=1024, ge=1, description="tokens per chunk of the output head; less: less memory"
    )
    save_checkpoint_steps: int = Field(default=100, ge=1, description="steps between checkpoints")
    save_checkpoint_minutes: float | None = Field(
        default=None,
        gt=0,
        description="also save a checkpoint this many minutes after the last one; null: by steps only",
    )
    also_save_steps: list[Annotated[int, Field(ge=1)]] = Field(
        default=[], description="further steps with a checkpoint"
    )
    keep_intermediate_checkpoints: bool = Field(default=True, description="keep the models of earlier checkpoints")
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="metric of evaluations (success_rate, mean_reward, or your own): keep the best model by it in "
        "finetune/best; null: none",
    )
    keep_last_checkpoints: int | None = Field(default=2, ge=1, description="training states to keep; null: all")
    save_final_training_state: bool = Field(default=True, description="save a training state at the end of the run")
    trust_remote_code: bool = Field(default=False, description="run code from the model's folder in all processes")
    record_token_ratios: bool = Field(
        default=True,
        description="record the importance ratio of every trained token for `view`, about 3 bytes each (needs "
        "streams on disk and streams.retention=all)",
    )
    weight_update_interval: int = Field(
        default=1,
        ge=1,
        description="optimizer steps between weight updates; each further step adds a version to the lag",
    )
    max_version_lag: int | None = Field(
        default=None, ge=0, description="do not train samples with tokens older than this many versions; null: no limit"
    )
    rl: RLConfig = RLConfig()

    @property
    def last_step(self) -> int:
        """The optimizer step that training ends with."""
        interrupt = self.interrupt_train_steps
        return self.max_train_steps if interrupt < 0 else min(interrupt, self.max_train_steps)

    @property
    def known_steps(self) -> int | None:
        """Steps that a display may promise; None: passes over the problems end training, most likely earlier."""
        return self.max_train_steps if self.max_epochs is None else None

    @property
    def samples_per_step(self) -> int:
        """Samples that close an optimizer step (`train_batch_size * gradient_accumulation_passes`)."""
        return self.train_batch_size * self.gradient_accumulation_passes
