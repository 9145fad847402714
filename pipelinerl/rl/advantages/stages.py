"""Which stages the advantages of a configuration go through. Asked by the preprocessor and by the trainer. No torch.

Baseline of the group and division by its spread come first, in the preprocessor. Then, over the whole step: KL in the
reward, normalisation, negative values cut. These three are the preprocessor's if reference servers scored the samples,
else the trainer's, which has the reference model beside it.
"""

from __future__ import annotations

from pipelinerl.config.finetune import RLConfig


def is_batch_normalized(rl: RLConfig) -> bool:
    """True if advantages are normalised over the whole step on top of their group."""
    if rl.advantage_estimator == "gae" or not rl.use_advantages:
        return False
    return rl.normalize_reward or rl.advantage_estimator == "reinforce_baseline"


def cuts_negative(rl: RLConfig) -> bool:
    """True if negative advantages become 0. Those of a value head are cut where they are made."""
    return rl.relu_log_p_weights and rl.advantage_estimator != "gae"


def is_finished_by_step(rl: RLConfig) -> bool:
    """True if something is done over the whole step."""
    return rl.reward_minus_kl_coef > 0 or is_batch_normalized(rl)
