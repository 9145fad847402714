"""Per-token estimators of KL(policy || reference) (J. Schulman, "Approximating KL Divergence", 2020).

With r = log ref - log new of a token that the policy sampled:
    k1 = -r             unbiased, can be negative; as a loss its expected gradient is zero: use it in the reward
    k2 = r^2 / 2        biased, low variance; as a loss its gradient is that of KL on-policy
    k3 = e^r - r - 1    unbiased, never negative, low variance
"""

from __future__ import annotations

import torch


def token_kl(new: torch.Tensor, ref: torch.Tensor, estimator: str = "k3", clamp: float = 5.0) -> torch.Tensor:
    """KL estimate of every token. Log-ratios are clamped to [-clamp, clamp] (no gradient beyond), so e^r is finite."""
    r = (ref - new).clamp(-clamp, clamp)
    if estimator == "k1":
        return -r
    if estimator == "k2":
        return r.square() / 2
    if estimator == "k3":
        # Near the reference e^r and 1 cancel: their difference in fp32 would be rounding, and often negative.
        return torch.expm1(r) - r
    raise ValueError(f"finetune.rl.kl_estimator: got {estimator!r}, expected k1, k2 or k3")
