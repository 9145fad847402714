"""How far off-policy a step was, and how well trainer and sampler agree: sums over micro-batches and ranks.

Call `DiagnosticsSum.add(inputs)` per micro-batch and `total()` at the end of the step, all-reduce `sums` (sum) and
`maxima` (max), then call `values()`, which is the first to wait for a GPU.

Effective sample size, with w = new / old by token (arXiv 2509.19128): ESS = (sum w)^2 / (N * sum w^2), 1 if on-policy.
It is reported before clamping (the truth) and after (what the gradient sees). Entropy is estimated from the sampled
tokens at no cost: sum(w * -log new) / sum(w), whose expectation is the policy's entropy. Quantiles come
from a fixed histogram of log-ratios, exact to one bin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipelinerl.rl.loss import MAX_LOG_RATIO, LossInputs

ON_POLICY_TOKENS = "rl/on_policy_tokens"  #: number of tokens in samples that the weights in training sampled as a whole
#: mean abs(log pi - log mu) over these tokens: the numerical gap alone. Absent without such tokens; above 0.5 the run
#: ends, unless `llm.parameters.min_tokens` is set
ON_POLICY_DIFF = "rl/logprob_abs_diff_on_policy"
RATIO_BINS = 2000
RATIO_RANGE = 5.0  # log-ratios beyond +-5 fall into the outermost bins
MAX_LAG_BIN = 64
#: Tokens kept before they are summed: four numbers each, about 20 MB.
MAX_WAITING_TOKENS = 1 << 20
_SCALARS = (
    *("tokens", "w", "w2", "clamped", "clamped2", "abs_diff", "kl", "over", "lag", "surprise"),
    *("on_policy", "on_policy_diff"),
)


@dataclass(frozen=True)
class StepDiagnostics:
    """Sums [scalars + ratio histogram + lag histogram] in fp64, and maxima [max |diff|, max ratio, max lag]."""

    sums: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def of_tokens(
        cls, new: torch.Tensor, old: torch.Tensor, lag: torch.Tensor, on_policy: torch.Tensor, clamp: float
    ) -> StepDiagnostics:
        """Diagnostics of trained tokens [N].

        Args:
            new, old: log-probs under trainer and sampler.
            lag: in versions, int64.
            on_policy: whether the weights in training sampled the whole sample, so that only rounding differs.
            clamp: upper bound of the importance weight.
        """
        log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()
        w = log_ratio.exp()
        bounded = w.clamp(max=clamp)
        lag = lag.clamp(min=0)
        scalars = torch.stack(
            [
                torch.ones_like(w).sum(),
                w.sum(),
                w.square().sum(),
                bounded.sum(),
                bounded.square().sum(),
                log_ratio.abs().sum(),
                # k3 of KL(sampler || trainer): tokens were drawn by the sampler, so r = log new - log old.
                (w - log_ratio - 1).sum(),
                (w > clamp).double().sum(),
                lag.double().sum(),
                -(w * new.double()).sum(),
                on_policy.double().sum(),
                # Not a product: NaN of another token would spread.
                torch.where(on_policy, log_ratio.abs(), 0.0).sum(),
            ]
        )
        place = ((log_ratio + RATIO_RANGE) * (RATIO_BINS / (2 * RATIO_RANGE))).long().clamp(0, RATIO_BINS - 1)
        ratios = torch.zeros(RATIO_BINS, dtype=torch.float64, device=w.device).index_add(0, place, torch.ones_like(w))
        lags = torch.zeros(MAX_LAG_BIN + 1, dtype=torch.float64, device=w.device).index_add(
            0, lag.clamp(max=MAX_LAG_BIN), torch.ones_like(w)
        )
        zero = torch.zeros(1, dtype=torch.float64, device=w.device)
        maxima = torch.stack([torch.cat([x.double(), zero]).max() for x in (log_ratio.abs(), w, lag)])
        return cls(torch.cat([scalars, ratios, lags]), maxima)

    def __add__(self, other: StepDiagnostics) -> StepDiagnostics:
        return StepDiagnostics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def values(self) -> dict[str, float]:
        """Metrics of the step. Empty if nothing was trained."""
        sums = self.sums.tolist()
        s = dict(zip(_SCALARS, sums, strict=False))
        count = s["tokens"]
        if not count:
            return {}
        ratios, lags = sums[len(_SCALARS) : -(MAX_LAG_BIN + 1)], sums[-(MAX_LAG_BIN + 1) :]
        values = {
            #: effective sample size (sum w)² / (N sum w²) of token weights w = pi / mu, before clamping; 1 if on-policy
            "finetune/ess": s["w"] ** 2 / (count * s["w2"]) if s["w2"] else 0.0,
            #: the same after clamping at the bound of the loss: what the gradient sees
            "finetune/ess_after_clamp": s["clamped"] ** 2 / (count * s["clamped2"]) if s["clamped2"] else 0.0,
            #: mean importance weight pi / mu per token; far from 1 is a fault or a collapse
            "rl/ratio_mean": s["w"] / count,
            "rl/ratio_max": float(self.maxima[1]),  #: largest importance weight of a token
            #: share of tokens with a weight above the bound of the loss
            "rl/ratio_over_clamp_fraction": s["over"] / count,
            #: k3 estimate of KL(sampler, trainer) per token; 2e-4 to 1e-3 for dense models in bf16
            "finetune/kl_sampler_trainer": s["kl"] / count,
            #: mean abs(log pi - log mu) over trained tokens: lag and numerical gap together
            "finetune/logprob_abs_diff_mean": s["abs_diff"] / count,
            "rl/logprob_abs_diff_max": float(self.maxima[0]),  #: largest abs(log pi - log mu)
            "rl/logprob_abs_diff_p99": _abs_quantile(ratios, 0.99),  #: 99 % quantile of abs(log pi - log mu)
            #: entropy in nats, estimated from the sampled tokens: sum(-w log pi) / sum(w)
            "rl/entropy_estimate": s["surprise"] / s["w"] if s["w"] else 0.0,
            "finetune/lag_mean_versions": s["lag"] / count,
            "finetune/lag_max_versions": float(self.maxima[2]),
            #: 1 % quantile of log(pi / mu), from a histogram with bins of 0.005
            "rl/log_ratio_p01": _quantile(ratios, 0.01),
            "rl/log_ratio_p50": _quantile(ratios, 0.5),  #: median of the same
            "rl/log_ratio_p99": _quantile(ratios, 0.99),  #: 99 % quantile of the same
            "rl/lag_share_0": lags[0] / count,  #: share of tokens sampled by the version in training
            "rl/lag_share_1": lags[1] / count,  #: share of tokens one version old
            "rl/lag_share_2_3": sum(lags[2:4]) / count,  #: share of tokens two or three versions old
            "rl/lag_share_4_7": sum(lags[4:8]) / count,  #: share of tokens four to seven versions old
            "rl/lag_share_8_plus": sum(lags[8:]) / count,  #: share of tokens at least eight versions old
        }
        if s["on_policy"]:
            values[ON_POLICY_TOKENS] = s["on_policy"]
            values[ON_POLICY_DIFF] = s["on_policy_diff"] / s["on_policy"]
        return values


class DiagnosticsSum:
    """Collects the trained tokens of a step and sums many at once: summing takes about a hundred kernels, which would
    slow down small models, while a micro-batch costs four small copies.
    """

    def __init__(self, clamp: float) -> None:
        self._clamp = clamp
        self._waiting: list[tuple[torch.Tensor, ...]] = []
        self._waiting_tokens = 0
        self._total: StepDiagnostics | None = None

    @torch.no_grad()
    def add(self, inputs: LossInputs) -> None:
        """Add one micro-batch."""
        new, old = inputs.of_trained(inputs.new_logprobs), inputs.of_trained(inputs.old_logprobs)
        versions = inputs.of_trained(inputs.versions)
        oldest = versions if inputs.oldest_versions is None else inputs.of_trained(inputs.oldest_versions)
        on_policy = (oldest == inputs.trainer_version) & (versions == inputs.trainer_version)
        self._waiting.append((new, old, inputs.trainer_version - versions, on_policy))
        self._waiting_tokens += len(new)
        if self._waiting_tokens >= MAX_WAITING_TOKENS:
            self._sum_up()

    def total(self) -> StepDiagnostics:
        """Diagnostics of everything that was added.

        Raises:
            ValueError: nothing was added.
        """
        if self._waiting:
            self._sum_up()
        if self._total is None:
            raise ValueError("diagnostics of no micro-batch, expected at least one")
        return self._total

    @torch.no_grad()
    def _sum_up(self) -> None:
        new, old, lag, on_policy = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        part = StepDiagnostics.of_tokens(new, old, lag, on_policy, self._clamp)
        self._total = part if self._total is None else self._total + part
        self._waiting, self._waiting_tokens = [], 0


def _quantile(histogram: list[float], q: float) -> float:
    """Middle of the bin with the q-quantile of the log-ratio."""
    return _bin_middle(_bin_of(histogram, q))


def _abs_quantile(histogram: list[float], q: float) -> float:
    """The same for |log-ratio|: bins of both signs are added."""
    half = len(histogram) // 2
    return _bin_middle(half + _bin_of([histogram[half + k] + histogram[half - 1 - k] for k in range(half)], q))


def _bin_of(histogram: list[float], q: float) -> int:
    target, seen = q * sum(histogram), 0.0
    for place, number in enumerate(histogram):
        seen += number
        if seen >= target and number:
            return place
    return len(histogram) - 1


def _bin_middle(place: int) -> float:
    return (place + 0.5) * (2 * RATIO_RANGE / RATIO_BINS) - RATIO_RANGE
