"""KL in the reward on tensors: `advantages/kl_reward.py` for one micro-batch with reference log-probs.

Called by the trainer where the reference model is beside it, before any forward pass; waits for nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pipelinerl.rl.batch import PADDING_SEGMENT, MicroBatch
from pipelinerl.rl.segments import segment_sum, to_tokens


def with_kl_in_reward(batch: MicroBatch, coefficient: float, as_token_rewards: bool) -> MicroBatch:
    """Each token's advantage minus coefficient * sum of KL from it to the end of its sample (arXiv 2501.03262).

    KL_t = log mu - log ref. Computed in fp64, kept in fp32.

    Args:
        as_token_rewards: put -coefficient * KL_t into `token_rewards` in place of that, for the recursion of `gae`.

    Raises:
        ValueError: the micro-batch has no reference log-probs.
    """
    if batch.ref_logprobs is None:
        raise ValueError(
            f"finetune.rl.reward_minus_kl_coef: got {coefficient} without reference log-probs, expected a reference "
            "model. Set finetune.rl.reference to auto, or the coefficient to 0"
        )
    difference = batch.old_logprobs.double() - batch.ref_logprobs.double()
    rewards = -coefficient * torch.where(batch.mask, difference, torch.zeros_like(difference))
    if as_token_rewards:
        return replace(batch, token_rewards=rewards.float())
    advantages = torch.where(batch.mask, batch.advantages.double() + _to_go(rewards, batch), 0.0)
    return replace(batch, advantages=advantages.float())


def _to_go(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum of `values` [R, T] from each position to the end of its sample."""
    to_row_end = values.flip(-1).cumsum(-1).flip(-1)
    is_first = (batch.position_ids == 0) & (batch.segment_ids != PADDING_SEGMENT)
    from_first = segment_sum(to_row_end, is_first, batch.segment_ids, batch.num_segments)
    of_sample = segment_sum(values, batch.mask, batch.segment_ids, batch.num_segments)
    # What lies behind the sample in its row.
    return to_row_end - to_tokens(from_first - of_sample, batch.segment_ids)
