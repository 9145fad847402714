"""Trains a tiny model on the recorded batches of `tests/golden/samples.jsonl`: one curve for each loss of `SETTINGS`.

Used by the golden tests and by `tests/golden/make.py`. The real step runner with the plain backend, fp32, one process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, register_own_attention
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.records import TrainingBatch
from pipelinerl.records.codec import RecordCodec

FOLDER = Path(__file__).parents[1] / "golden"
SAMPLES = FOLDER / "samples.jsonl"
STEPS = 20
VOCABULARY = 32

# The settings of each loss: where it has a choice, the one that lets its own branches be taken on these samples.
SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce": {"clamp": 1.5},
    "ppo": {"epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 1.3, "aggregation": "token"},
    "gspo": {"epsilon_low": 0.05, "epsilon_high": 0.08, "aggregation": "sample_mean"},
    "cispo": {"epsilon_low": 0.5, "epsilon_high": 0.2, "aggregation": "token"},
    "decoupled_ppo": {"epsilon_low": 0.1, "epsilon_high": 0.1, "clamp": 1.5},
    "sapo": {"soft_gate_positive": 1.5, "soft_gate_negative": 2.0, "aggregation": "sample_mean"},
}


def golden_model() -> Qwen2ForCausalLM:
    """About 20 000 parameters drawn by Python's own generator, whose numbers no version of torch changes."""
    register_own_attention()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            attn_implementation=SEGMENTED_ATTENTION,
            dtype="float32",
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = random.Random(f"golden/{name}")
            center = 1.0 if "norm" in name else 0.0
            numbers = [draw.gauss(center, 0.2) for _ in range(parameter.numel())]
            parameter.copy_(torch.tensor(numbers).view_as(parameter))
    return model.train()


def golden_config(loss: str, **rl: Any) -> FinetuneConfig:
    """`rl` overrides the settings of the loss. The large epsilon keeps Adam from blowing up rounding errors of
    gradients near zero."""
    return FinetuneConfig(
        seq_length=64,
        learning_rate=3e-3,
        adam_epsilon=1e-4,
        gradient_clipping_threshold=1.0,
        lr_scheduler_type="constant",
        num_warmup_steps=0,
        max_train_steps=STEPS,
        rl={"policy_loss": loss, **SETTINGS.get(loss, {}), **rl},
    )


class GoldenTrainer:
    """A policy with the trainer's own step runner around it."""

    def __init__(self, config: FinetuneConfig, dtype: torch.dtype = torch.float32) -> None:
        self.policy = PolicyModel(golden_model(), compute_dtype=dtype).to(dtype)
        ranks = Ranks()
        backend = PlainBackend(self.policy, config, ranks)
        self._steps = StepRunner(backend, config, ranks)

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step; its line of the curve, named as in a run's `metrics.jsonl`."""
        result = self._steps.run(batch)
        return {
            "step": batch.step,
            "finetune/loss": result.metrics["finetune/loss"],
            "finetune/grad_norm": result.grad_norm,
        }


def recorded_batches() -> Iterator[TrainingBatch]:
    """The batches of `samples.jsonl`, one optimizer step each."""
    for line in SAMPLES.read_bytes().splitlines():
        yield RecordCodec[TrainingBatch](TrainingBatch).decode(line)


def train(loss: str, batches: Sequence[TrainingBatch], dtype: torch.dtype = torch.float32, **rl: Any) -> list[dict]:
    """The curve of `loss` over `batches`."""
    trainer = GoldenTrainer(golden_config(loss, **rl), dtype)
    return [trainer.step(batch) for batch in batches]
