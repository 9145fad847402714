"""What the trainer reports to the rest of the run: messages, fates and metrics (rank 0).

`TrainerStarted` comes first and `TrainingDone` last. Order of one step: `StepEnding`, weight update, fates of the
trained samples, `StepDone`, metrics.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipelinerl.finetune.checkpoint import TrainerState
from pipelinerl.records import (
    FateRecord,
    Sample,
    StepDone,
    StepEnding,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
    WeightUpdateSuccess,
    record_time,
)
from pipelinerl.streams.base import StreamWriter
from pipelinerl.streams.recorder import MetricRecorder

if TYPE_CHECKING:
    from pipelinerl.finetune.weight_sync import Delivery

SOURCE = "finetune_0"
_GIB = 2**30


@dataclass(frozen=True)
class Reporter:
    """Writes the messages of rank 0. Writes raise StreamError."""

    messages: StreamWriter[TrainerMessage]
    fates: StreamWriter[FateRecord]
    metrics: MetricRecorder
    incarnation: int = 0
    clock: Callable[[], float] = record_time

    def started(self, state: TrainerState) -> None:
        """Announce where this incarnation continues; later steps of older ones do not count."""
        self.messages.write(
            TrainerStarted(
                step=state.step, data_offset=state.data_offset, time=self.clock(), incarnation=self.incarnation
            )
        )
        self.messages.flush()

    def weights_delivered(self, delivery: Delivery) -> None:
        self.messages.write(
            WeightUpdateSuccess(
                version=delivery.version,
                time=self.clock(),
                seconds=delivery.seconds,
                num_servers=delivery.num_servers,
                probe_abs_diff=delivery.probe_abs_diff,
                sent_bytes=delivery.sent_bytes,
                incarnation=self.incarnation,
            )
        )
        self.messages.flush()

    def step_ending(self, step: int) -> None:
        # Not flushed: only the time matters.
        self.messages.write(StepEnding(step=step, time=self.clock(), incarnation=self.incarnation))

    def step_done(self, batch: TrainingBatch, state: TrainerState, wait_data_s: float) -> None:
        """Settle the samples of `batch` as trained, one fate record per group, then announce the step.

        `wait_data_s`: how long the trainer waited for `batch`.
        """
        for group_id, samples in _by_group(batch).items():
            self.fates.write(
                FateRecord(
                    sample_ids=[sample.id for sample in samples],
                    fate="trained",
                    reason="trained",
                    version=batch.step,
                    group_id=group_id,
                    source=SOURCE,
                    output_tokens=sum(sample.output_tokens for sample in samples),
                    incarnation=self.incarnation,
                )
            )
        self.fates.flush()
        self.messages.write(
            StepDone(
                step=batch.step,
                time=self.clock(),
                group_ids=batch.group_ids,
                num_samples=len(batch.samples),
                samples_processed=state.samples_processed,
                wait_data_s=wait_data_s,
                incarnation=self.incarnation,
            )
        )
        self.messages.flush()

    def training_done(self, state: TrainerState) -> None:
        self.messages.write(
            TrainingDone(
                version=state.step,
                time=self.clock(),
                samples_processed=state.samples_processed,
                incarnation=self.incarnation,
            )
        )
        self.messages.flush()


def _by_group(batch: TrainingBatch) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in batch.samples:
        groups[sample.group_id].append(sample)
    return groups


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on rank 0: waiting for data, switching between generation and training (rollouts that finish,
    devices that change hands), training, updating the servers, and in total."""

    wait_data_s: float
    switch_s: float
    train_s: float
    weight_update_s: float
    step_s: float

    def values(self) -> dict[str, float]:
        """As metrics."""
        return {
            "finetune/wait_data_s": self.wait_data_s,  #: of these, waiting for the batch
            #: of these, switching between generation and training: rollouts that finish, devices that change hands
            "finetune/switch_s": self.switch_s,
            "finetune/train_s": self.train_s,  #: of these, forward, backward and optimizer
            #: of these, sending the weights to the servers (and waking them)
            "finetune/weight_update_s": self.weight_update_s,
            "finetune/step_s": self.step_s,  #: seconds of the whole step
            "finetune/idle_s": max(self.step_s - self.train_s, 0.0),  #: `step_s` minus `train_s`
        }


def step_metrics(
    batch: TrainingBatch, rl: Mapping[str, float], grad_norm: float, learning_rate: float, times: StepTimes
) -> dict[str, float]:
    """All metrics of a step. `rl` holds those of loss and diagnostics, over all ranks."""
    values = {
        "finetune/grad_norm": grad_norm,  #: gradient norm over all ranks, before clipping
        "finetune/learning_rate": learning_rate,  #: learning rate of this step
    }
    values.update(batch_metrics(batch))
    values.update(times.values())
    #: samples of the step over its whole time, waiting included
    values["finetune/samples_per_s"] = len(batch.samples) / max(times.step_s, 1e-9)
    values.update(rl)
    return values


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Metrics of the batch alone. Lag of a token = version trained against (step - 1) - its own version."""
    samples = batch.samples
    spans = [span for sample in samples for span in sample.version_spans]
    tokens = sum(span.end - span.start for span in spans)
    weighted = sum((batch.step - 1 - span.version) * (span.end - span.start) for span in spans)
    return {
        "finetune/samples": len(samples),  #: samples of the step
        "finetune/tokens": sum(len(sample.input_ids) for sample in samples),  #: tokens of the step, prompts included
        "finetune/output_tokens": sum(sample.output_tokens for sample in samples),  #: tokens sampled by the servers
        "finetune/trained_tokens": tokens,  #: tokens with a log-prob and a gradient
        #: mean reward of the trained samples
        "finetune/reward_mean": sum(sample.reward for sample in samples) / max(len(samples), 1),
        #: mean over trained tokens of the version in training minus the one that sampled the token
        "finetune/lag_mean_versions": weighted / max(tokens, 1),
        #: largest such lag of the step
        "finetune/lag_max_versions": max((batch.step - 1 - span.version for span in spans), default=0),
        #: passes over the problems whose rollouts have all ended; `finetune.max_epochs` ends the run
        "finetune/epochs_done": batch.epochs_done,
        #: samples whose tokens come from more than one version
        "finetune/multi_version_samples": sum(len(sample.version_spans) > 1 for sample in samples),
    }


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory since the last call, allocated and reserved by PyTorch; without a GPU that of the process since its
    start."""
    if device.type != "cuda":
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        #: largest memory of the trainer's process (rank 0) since its start, GiB; without a GPU
        return {"finetune/memory_peak_gib": kibibytes / 2**20}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        #: peak memory of tensors on the GPU of rank 0 during the step, GiB
        "finetune/gpu_memory_peak_gib": allocated / _GIB,
        #: the same including memory that PyTorch holds in reserve, GiB
        "finetune/gpu_memory_reserved_peak_gib": reserved / _GIB,
    }
