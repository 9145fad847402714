"""Ends a run whose servers sample from another distribution than they are believed to. Called by the loop every step.

The probe behind a weight update asks a server about one sequence at a time. A server may be right then and wrong when
it is busy (a kernel, or CUDA graphs, that fail for large batches). What it sampled with the very weights in training
says so: the trainer's log-probs of these tokens have to be the server's but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipelinerl.config.sections import LLMParameters
from pipelinerl.errors import WeightSyncError
from pipelinerl.rl.diagnostics import ON_POLICY_DIFF, ON_POLICY_TOKENS

#: Nats on average. Rounding in bf16 makes 0.02 of answers with much entropy; a quantized server some 0.1; a broken one
#: more than 1.
MAX_ON_POLICY_DIFF = 0.5
#: Fewer tokens say little.
MIN_ON_POLICY_TOKENS = 256


def samples_everything(parameters: LLMParameters) -> bool:
    """Whether servers sample from the whole distribution, which is what the trainer's log-probs are of.

    `min_tokens` takes the ends out of it: where the model would end its answer, the log-probs differ by far more than
    by rounding, and no server is to blame.
    """
    return parameters.min_tokens == 0


def check_on_policy(metrics: Mapping[str, float], step: int) -> None:
    """Look at the metrics of a step, which are the same on all ranks.

    Raises:
        WeightSyncError: tokens that the weights in training sampled have other log-probs under them.
    """
    tokens, difference = metrics.get(ON_POLICY_TOKENS, 0.0), metrics.get(ON_POLICY_DIFF, 0.0)
    # Written so that NaN is refused.
    if tokens < MIN_ON_POLICY_TOKENS or difference <= MAX_ON_POLICY_DIFF:
        return
    raise WeightSyncError(
        "actor servers",
        f"at step {step}, {tokens:.0f} tokens that the weights in training had sampled differ by {difference:.3g} nats "
        f"on average from the trainer's log-probs, expected at most {MAX_ON_POLICY_DIFF:g}: a server computes other "
        "things when it is busy than on the probe, or rollouts sample with other parameters than llm.parameters says. "
        "Set vllm_config.vllm_kwargs.enforce-eager='' to see whether CUDA graphs or compilation are the reason",
    )
