"""The numbers of one step under their published names (`finetune/...`). Pure; called by the loop. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl.records import TrainingBatch

_RENAMED = {
    "rl/loss": "finetune/loss",
    "rl/ess": "finetune/ess",
    "rl/ess_clamped": "finetune/ess_after_clamp",
    "rl/lag_max_versions": "finetune/lag_max_versions",
    "rl/lag_mean_versions": "finetune/lag_mean_versions",
    "rl/logprob_abs_diff_mean": "finetune/logprob_abs_diff_mean",
    "rl/kl_sampler_trainer": "finetune/kl_sampler_trainer",
}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on rank 0: waiting for data, changing turns with the servers (rollouts that end, devices that
    are handed over), training, handing over the weights, the whole."""

    wait_data_s: float
    switch_s: float
    train_s: float
    weight_update_s: float
    step_s: float

    def values(self) -> dict[str, float]:
        """`idle_s` is the part of the step in which nothing was trained."""
        return {
            "finetune/wait_data_s": self.wait_data_s,
            "finetune/switch_s": self.switch_s,
            "finetune/train_s": self.train_s,
            "finetune/weight_update_s": self.weight_update_s,
            "finetune/step_s": self.step_s,
            "finetune/idle_s": max(self.step_s - self.train_s, 0.0),
        }


def step_metrics(
    batch: TrainingBatch, rl: Mapping[str, float], grad_norm: float, learning_rate: float, times: StepTimes
) -> dict[str, float]:
    """All numbers of a step. `rl` are those of loss and diagnostics, already reduced over ranks."""
    values = {"finetune/grad_norm": grad_norm, "finetune/learning_rate": learning_rate}
    values.update(batch_metrics(batch))
    values.update(times.values())
    values["finetune/samples_per_s"] = len(batch.samples) / max(times.step_s, 1e-9)
    for name, value in rl.items():
        values[_RENAMED.get(name, name)] = value
    return values


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """What can be read off the batch alone. Lag of a token = version trained against (step - 1) - its own version."""
    samples = batch.samples
    spans = [span for sample in samples for span in sample.version_spans]
    tokens = sum(span.end - span.start for span in spans)
    weighted = sum((batch.step - 1 - span.version) * (span.end - span.start) for span in spans)
    return {
        "finetune/samples": len(samples),
        "finetune/tokens": sum(len(sample.input_ids) for sample in samples),
        "finetune/output_tokens": sum(sample.output_tokens for sample in samples),
        "finetune/trained_tokens": tokens,
        "finetune/reward_mean": sum(sample.reward for sample in samples) / max(len(samples), 1),
        "finetune/lag_mean_versions": weighted / max(tokens, 1),
        "finetune/lag_max_versions": max((batch.step - 1 - span.version for span in spans), default=0),
        "finetune/epochs_done": batch.epochs_done,
        "finetune/multi_version_samples": sum(len(sample.version_spans) > 1 for sample in samples),
    }
