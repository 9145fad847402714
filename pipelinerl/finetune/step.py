"""One optimizer step: forward, loss and backward over this rank's micro-batches, then the update.

All ranks run the same number of micro-batches (sentinels, which contribute exactly zero, fill up), so that collectives
stay in step. The gradient is that of the sum over tokens of weight * token loss, with weights of the whole step, so it
does not depend on packing, micro-batches or ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.attention import VARLEN_ATTENTION, Layout
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.model import ReferenceModel
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.token_ratios import RatioRecorder
from pipelinerl.records import Sample, TrainingBatch
from pipelinerl.rl.advantages import NORM_EPSILON, are_equal, cuts_negative, has_signal
from pipelinerl.rl.diagnostics import DiagnosticsSum, StepDiagnostics
from pipelinerl.rl.loss import EntropyControl, LossInputs, Metrics, coefficients_at, compute_loss
from pipelinerl.rl.microbatch import MicroBatch, collate, token_weights
from pipelinerl.rl.packing import plan_step
from pipelinerl.world.forecast import SHARED_ROOM


@dataclass(frozen=True)
class StepResult:
    """Result of one step, the same on all ranks. `metrics` are those of loss and diagnostics (`rl/...`)."""

    grad_norm: float
    learning_rate: float
    seconds: float
    metrics: dict[str, float]
    #: For the next step; None without `finetune.rl.target_entropy`.
    entropy_control: EntropyControl | None = None

    @property
    def skipped(self) -> bool:
        """The gradient was not finite, and nothing was changed."""
        return not math.isfinite(self.grad_norm)


class StepRunner:
    """Takes optimizer steps with one backend.

    Args:
        reference: replaces the reference log-probs of the batch.
        on_micro_batch: called after each micro-batch for the heartbeat: a step can take an hour.
        before_last: called with the step before its last micro-batch.
        ratios: records the importance ratios of tokens, if given.
    """

    def __init__(
        self,
        backend: Backend,
        config: FinetuneConfig,
        ranks: Ranks,
        pad_id: int = 0,
        reference: ReferenceModel | None = None,
        on_micro_batch: Callable[[], object] = lambda: None,
        before_last: Callable[[int], object] = lambda step: None,
        ratios: RatioRecorder | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._ranks = ranks
        self._schedule = schedule_of(config)
        self._pad_id = pad_id
        self._reference = reference
        self._on_micro_batch = on_micro_batch
        self._before_last = before_last
        self._ratios = ratios

    def run(self, batch: TrainingBatch, entropy_control: EntropyControl | None = None) -> StepResult:
        """Train on `batch` and update the weights. Waits for the other ranks in the last backward.

        Args:
            entropy_control: state of `finetune.rl.target_entropy`; None: initial.
        """
        start = time.perf_counter()
        control = EntropyControl.at(self._config.rl, entropy_control)
        factor = self._schedule.factor(batch.step, batch.epochs_done)
        self._backend.set_learning_rate(factor)
        metrics, diagnostics = self.accumulate(batch, control)
        norm = self._backend.step()
        values = {**reduce_metrics(metrics, self._ranks), **reduce_diagnostics(diagnostics, self._ranks)}
        without_signal = sum(not has_signal(sample.advantage or 0.0, self._config.rl) for sample in batch.samples)
        #: share of samples with advantage 0 within their group; several steps of 1 in a row print a note
        values["finetune/zero_advantage_fraction"] = without_signal / max(len(batch.samples), 1)
        if control is not None:
            #: coefficient of the entropy bonus in this step (only with `finetune.rl.target_entropy`)
            values["rl/entropy_bonus"] = control.bonus(self._config.rl)
            control = control.after(self._config.rl, values)
        learning_rate = factor * self._config.learning_rate
        return StepResult(norm, learning_rate, time.perf_counter() - start, values, control)

    def accumulate(
        self, batch: TrainingBatch, entropy_control: EntropyControl | None = None
    ) -> tuple[Metrics, StepDiagnostics]:
        """Forward and backward of the whole step, without the update (gradients stay in the backend)."""
        total_steps = self._schedule.total_at(batch.step, batch.epochs_done)
        coefficients = coefficients_at(self._config.rl, batch.step, total_steps)
        if entropy_control is not None:
            coefficients = replace(coefficients, entropy=entropy_control.bonus(self._config.rl))
        micro_batches = self.micro_batches(batch)
        metrics: Metrics = {}
        diagnostics = DiagnosticsSum(self._config.rl.weight_bound)
        for number, micro_batch in enumerate(micro_batches, start=1):
            micro_batch, layout = self._backend.policy.placed(micro_batch, self._ranks.device)
            if is_last := number == len(micro_batches):
                self._before_last(batch.step)
            outputs = self._backend.forward(micro_batch, layout, is_last=is_last)
            inputs = LossInputs.of(
                micro_batch,
                outputs.logprobs,
                entropy=outputs.entropy,
                values=outputs.values,
                trainer_version=batch.step - 1,
            )
            loss, found = compute_loss(inputs, self._config.rl, coefficients)
            with self._backend.policy.products():
                self._backend.backward(_connected(loss, inputs), is_last=is_last)
            #: tokens that went through the model, fewer than `finetune/tokens` where samples share prefixes
            found["finetune/computed_tokens"] = torch.tensor(float(_computed_tokens(micro_batch, layout)))
            metrics |= {name: metrics[name] + value if name in metrics else value for name, value in found.items()}
            diagnostics.add(inputs)
            if self._ratios is not None:
                self._ratios.add(micro_batch, inputs)
            self._on_micro_batch()
        return metrics, diagnostics.total()

    def micro_batches(self, batch: TrainingBatch) -> list[MicroBatch]:
        """This rank's micro-batches, padded with sentinels to the largest number of any rank (at least 1)."""
        config, ranks = self._config, self._ranks.world_size
        plan, room = batch.plan, _shared_room(self._backend.policy)
        is_too_long = config.seq_packing and room != SHARED_ROOM and _longest_row(batch) > config.seq_length
        if len(plan) != ranks or is_too_long:
            # It was made for other ranks, or for an attention that needs less memory for shared tokens.
            plan = plan_step(batch.samples, ranks, config, room)
        weights = token_weights(batch.samples, config.rl.aggregation, config.rl.constant_length_tokens)
        share, longest = plan[self._ranks.rank], max(1, *map(len, plan))
        own = [
            # Without indices: a sentinel.
            collate(batch.samples, indices, weights=weights, packed=config.seq_packing, pad_id=self._pad_id)
            for indices in [*share, *[[]] * (longest - len(share))]
        ]
        has_reference = any(sample.ref_logprobs for sample in batch.samples)
        own = [_with_reference(micro_batch, has_reference) for micro_batch in own]
        if self._reference is not None:
            found = self._reference.logprobs(own)
            own = [replace(micro_batch, ref_logprobs=values) for micro_batch, values in zip(own, found, strict=True)]
        return finish_advantages(own, batch.samples, config.rl, self._ranks)


def _shared_room(policy: PolicyModel) -> float | None:
    """Room of a shared token in a row (see `rl.packing`); None if the policy shares none."""
    if not policy.can_share_prefixes:
        return None
    return SHARED_ROOM if policy.attention == VARLEN_ATTENTION else 1.0


def _longest_row(batch: TrainingBatch) -> int:
    """Tokens of the longest row of the plan, shared ones too."""
    rows = (row for rank in batch.plan for row in rank)
    return max((sum(len(batch.samples[index].input_ids) for index in row) for row in rows), default=0)


def _computed_tokens(batch: MicroBatch, layout: Layout | None) -> int:
    """Positions that go through the layers; none of a sentinel count."""
    if batch.num_segments == 0:
        return 0
    shared = None if layout is None else layout.shared
    return batch.input_ids.numel() if shared is None else shared.kept.numel()


def _connected(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """`loss`, with a zero path to the value head: collectives wait for a gradient of every parameter, even if it is
    unused."""
    return loss if inputs.values is None else loss + 0.0 * inputs.values.sum()


def _with_reference(batch: MicroBatch, has_reference: bool) -> MicroBatch:
    """Reference log-probs on all micro-batches of the step or on none: ranks must report the same metrics."""
    if has_reference == (batch.ref_logprobs is not None):
        return batch
    return replace(batch, ref_logprobs=torch.zeros_like(batch.old_logprobs) if has_reference else None)


def reduce_metrics(metrics: Metrics, ranks: Ranks) -> dict[str, float]:
    """Sums over all ranks, which have the same names because sentinels go through the loss too."""
    names = sorted(metrics)
    return dict(zip(names, ranks.sum([float(metrics[name]) for name in names]), strict=True))


def reduce_diagnostics(diagnostics: StepDiagnostics, ranks: Ranks) -> dict[str, float]:
    """The step's diagnostics over all ranks (empty if nothing was trained)."""
    if ranks.world_size > 1:
        diagnostics = replace(
            diagnostics,
            sums=torch.tensor(ranks.sum(diagnostics.sums.tolist()), dtype=torch.float64),
            maxima=torch.tensor(ranks.max(diagnostics.maxima.tolist()), dtype=torch.float64),
        )
    return diagnostics.values()


def finish_advantages(
    micro_batches: Sequence[MicroBatch], samples: Sequence[Sample], rl: RLConfig, ranks: Ranks
) -> list[MicroBatch]:
    """This rank's micro-batches on the CPU with final advantages: KL in the reward, normalization over the step,
    clipping of negative values. Waits for the other ranks if advantages are normalized.

    With A_i the advantage of sample i from the group stage (`rl/advantages.py`) and KL_t = log mu - log ref of its
    trained token t (k1 of J. Schulman, "Approximating KL Divergence", 2020), token t gets

        A_i,t = A_i - beta * sum over t' >= t of KL_t'              beta = `finetune.rl.reward_minus_kl_coef`
        A_i,t = (A_i,t - mean(A)) / (std(A) + 1e-8)                 over the trained tokens of the step

    (REINFORCE++, arXiv 2501.03262: a token pays for itself and for what follows in its sample). With `gae` the share of
    each token, -beta * KL_t (arXiv 2402.03300, equation 2), becomes its `token_rewards` instead. KL comes after the
    baseline: inside it, it would be the only difference between rollouts of equal reward, and dividing by the group's
    spread would blow it up to the size of a reward. Computed in float64 and rounded once, to float32.

    Args:
        samples: all samples of the step; a micro-batch's `indices` point into them.

    Raises:
        ValueError: KL is part of the reward and a micro-batch has no reference log-probs.
    """
    own = list(micro_batches)
    advantages = [_of_samples(batch, samples) for batch in own]
    if rl.reward_minus_kl_coef:
        rewards = [_kl_rewards(batch, rl.reward_minus_kl_coef) for batch in own]
        if rl.advantage_estimator == "gae":
            return [replace(batch, token_rewards=reward.float()) for batch, reward in zip(own, rewards, strict=True)]
        advantages = [a + _to_go(r, batch) for a, r, batch in zip(advantages, rewards, own, strict=True)]
    if rl.normalizes_over_step:
        advantages = _normalized(advantages, own, ranks)
    if cuts_negative(rl):
        advantages = [values.clamp(min=0.0) for values in advantages]
    return [
        replace(batch, advantages=torch.where(batch.mask, values, 0.0).float())
        for batch, values in zip(own, advantages, strict=True)
    ]


def _of_samples(batch: MicroBatch, samples: Sequence[Sample]) -> torch.Tensor:
    """Each sample's advantage at all its positions: [R, T] float64."""
    values = [samples[index].advantage or 0.0 for index in batch.indices] or [0.0]
    return torch.tensor(values, dtype=torch.float64)[batch.segment_ids.clamp(min=0)]


def _kl_rewards(batch: MicroBatch, coefficient: float) -> torch.Tensor:
    """-beta * KL_t of every trained token, 0 elsewhere: [R, T] float64."""
    if batch.ref_logprobs is None:
        raise ValueError(
            f"finetune.rl.reward_minus_kl_coef: got {coefficient} without reference log-probs, expected a reference "
            "model. Set finetune.rl.reference to auto, or the coefficient to 0"
        )
    difference = batch.old_logprobs.double() - batch.ref_logprobs.double()
    return -coefficient * torch.where(batch.mask, difference, 0.0)


def _to_go(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum of `values` [R, T] from each trained token to the end of its sample; 0 elsewhere."""
    result = torch.zeros_like(values)
    for segment in range(batch.num_segments):
        at = batch.mask & (batch.segment_ids == segment)
        result[at] = values[at].flip(0).cumsum(0).flip(0)
    return result


def _normalized(
    advantages: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], ranks: Ranks
) -> list[torch.Tensor]:
    """(A - mean) / (std + 1e-8) over the trained tokens of all ranks; all 0 if they are equal up to rounding."""
    values = torch.cat([of_batch[batch.mask] for of_batch, batch in zip(advantages, micro_batches, strict=True)])
    has_any = values.numel() > 0
    count, total = ranks.sum([float(values.numel()), float(values.sum())])
    (low,) = ranks.min([float(values.min()) if has_any else math.inf])
    (high,) = ranks.max([float(values.max()) if has_any else -math.inf])
    mean = total / max(count, 1.0)
    (squares,) = ranks.sum([float((values - mean).square().sum())])
    if count == 0 or are_equal([low, high]):
        return [torch.zeros_like(of_batch) for of_batch in advantages]
    scale = math.sqrt(squares / count) + NORM_EPSILON
    return [(of_batch - mean) / scale for of_batch in advantages]
