"""KL to the reference model as a reward of every token, and what a token's rewards add up to. No torch.

    r_t = -beta * KL_t        KL_t = log mu(y_t) - log ref(y_t)
    G_t = r_t + r_{t+1} + ... + r_n

KL_t is k1 of J. Schulman, "Approximating KL Divergence" (2020). PPO on language models has r_t in its rewards (arXiv
2203.02155; written out in arXiv 2402.03300, equation 2); the advantage of REINFORCE++ (arXiv 2501.03262) is the
sample's reward plus G_t. Both are over the trained tokens of one sample; nothing is discounted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def kl_rewards(logprobs: Sequence[float], ref_logprobs: Sequence[float], coefficient: float) -> list[float]:
    """r_t of every trained token.

    Raises:
        ValueError: lengths differ.
    """
    if len(logprobs) != len(ref_logprobs):
        raise ValueError(
            f"finetune.rl.reward_minus_kl_coef: got {len(ref_logprobs)} ref_logprobs for {len(logprobs)} trained "
            "tokens, expected as many"
        )
    return [-coefficient * (mu - ref) for mu, ref in zip(logprobs, ref_logprobs, strict=True)]


def rewards_to_go(rewards: Sequence[float]) -> list[float]:
    """G_t of every token: its reward and those of all that follow."""
    return list(accumulate(reversed(rewards)))[::-1]
