"""Config section of the trainer (`finetune`) and of the algorithm (`finetune.rl`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.config.base import Section


class LoraConfig(Section):
    enabled: bool = False
    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=16, gt=0)
    bias: Literal["none", "all", "lora_only"] = "none"
    target_modules: list[str] = []
    sync: Literal["merged", "adapter"] = "merged"


class RLConfig(Section):
    """The algorithm. Defaults follow arXiv 2509.19128: truncated importance weights with c = 5, leave-one-out
    baseline, no value network, no KL, no entropy bonus, no trust region."""

    policy_loss: Literal["reinforce", "ppo", "gspo", "cispo", "decoupled_ppo", "sapo"] = "reinforce"
    clamp: float = Field(default=5.0, gt=0, description="upper bound c of the importance weight of `reinforce`")
    advantage_estimator: Literal["rloo", "grpo", "dr_grpo", "reinforce", "reinforce_baseline", "gae"] = "rloo"
    divide_advantage_by_std: bool = False
    normalize_reward: bool = False
    aggregation: Literal["sample", "sample_mean", "token", "group", "constant_length"] = "sample"
    constant_length_tokens: int | None = Field(default=None, ge=1)
    kl_coef: float = Field(default=0.0, ge=0)
    final_kl_coef: float | None = Field(default=None, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reward_minus_kl_coef: float = Field(default=0.0, ge=0)
    reference: Literal["auto", "servers", "local"] = "auto"
    reference_offload: bool = False
    entropy_bonus: float = Field(default=0.0, ge=0)
    final_entropy_bonus: float | None = Field(default=None, ge=0)
    target_entropy: float | None = Field(default=None, gt=0, description="nats per token; null: no target")
    entropy_bonus_step: float = Field(default=0.005, gt=0)
    epsilon_low: float = Field(default=0.2, ge=0, lt=1)
    epsilon_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    soft_gate_positive: float = Field(default=1.0, gt=0)
    soft_gate_negative: float = Field(default=1.05, gt=0)
    use_advantages: bool = True
    relu_log_p_weights: bool = False
    clamp_log_ratio_ref_new_value: float = Field(default=5.0, gt=0)
    overlong_filtering: bool = False
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    overlong_limit_tokens: int | None = Field(default=None, ge=1)
    overlong_penalty: float = Field(default=1.0, ge=0)
    filter_zero_advantage_groups: bool = False
    filter_reward_low: float | None = None
    filter_reward_high: float | None = None
    importance_correction: Literal["none", "truncate", "mask", "icepop", "geometric_mask"] = "none"
    importance_level: Literal["token", "sequence"] = "token"
    importance_low: float = Field(default=0.5, ge=0)
    importance_high: float = Field(default=2.0, gt=0)
    value_loss_coef: float = Field(default=0.0, ge=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=1.0, ge=0, le=1)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are part of the algorithm."""
        return self.kl_coef > 0 or (self.final_kl_coef or 0.0) > 0 or self.reward_minus_kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the exact entropy of the policy is part of the loss."""
        return self.entropy_bonus > 0 or bool(self.final_entropy_bonus) or self.target_entropy is not None


class FinetuneConfig(Section):
    model_class: Literal["causal-language-modeling", "causal-language-modeling-with-value-head"] = (
        "causal-language-modeling"
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    load_as_bf16: bool = True
    dtype: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    attn_implementation: Literal["auto", "flash_attention_2", "flex_attention", "sdpa", "eager"] = "auto"
    use_flash_attention: bool = True
    lora: LoraConfig = LoraConfig()
    train_batch_size: int = Field(default=1, ge=1)
    gradient_accumulation_passes: int = Field(default=1024, ge=1)
    weight_decay: float = Field(default=0.0, ge=0)
    learning_rate: float = Field(default=1e-6, gt=0)
    critic_learning_rate: float | None = Field(default=None, gt=0)
    gradient_clipping_threshold: float | None = Field(default=0.3, gt=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    num_warmup_steps: int = Field(default=50, ge=0)
    gradient_checkpointing: bool = True
    reentrant_checkpointing: bool = False
    max_train_steps: int = Field(default=1000, ge=1)
    max_epochs: int | None = Field(default=None, ge=1, description="passes over the problems; null: no such end")
    interrupt_train_steps: int = Field(default=-1, ge=-1)
    seq_length: int = Field(default=12000, ge=2)
    seq_packing: bool = True
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    save_checkpoint_steps: int = Field(default=100, ge=1)
    also_save_steps: list[int] = []
    keep_intermediate_checkpoints: bool = True
    keep_best: str | None = Field(default=None, min_length=1, description="metric of evaluations; null: not kept")
    keep_last_checkpoints: int | None = Field(default=None, ge=1)
    save_final_training_state: bool = True
    trust_remote_code: bool = False
    log_each_n_steps: int = Field(default=1, ge=1)
    send_weight_updates: bool = True
    weight_update_interval: int = Field(default=1, ge=1)
    max_version_lag: int | None = Field(default=None, ge=0)
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
