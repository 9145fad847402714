"""SAPO: a soft gate in place of a clip (Soft Adaptive Policy Optimization, arXiv 2511.20347).

    loss_t = -f(r_t) * A_t        f(r) = 4 / tau * sigmoid(tau * (r - 1))        r_t = pi(y_t) / mu(y_t)

Near r = 1 the gradient is that of the plain ratio, and it fades to 0 smoothly on both sides. tau is
`soft_gate_positive` where A_t > 0, else `soft_gate_negative`: larger, so tokens that become less likely fade sooner.
"""

from __future__ import annotations

import torch

from pipelinerl.config.algorithm import SapoLoss
from pipelinerl.rl.loss import LossInputs, LossOutputs


def sapo(inputs: LossInputs, config: SapoLoss) -> LossOutputs:
    ratio = inputs.log_ratio().exp()
    positive = inputs.advantages > 0
    tau = torch.where(positive, config.soft_gate_positive, config.soft_gate_negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    # What is left of the gradient of the ratio: f'(r), 1 on-policy.
    slope = (4 * gate * (1 - gate)).detach()
    metrics = {"rl/soft_gate_mean": inputs.token_mean(slope)}  #: SAPO: mean share of the gradient that passes the gate
    return LossOutputs(-4 / tau * gate * inputs.advantages, metrics)
