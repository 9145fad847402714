"""Random inputs of the output head, and what comes of them: by the chunked head, or by PyTorch with all logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pipelinerl.finetune.policy import logprobs_from_logits, token_logprobs


@dataclass(frozen=True)
class HeadCase:
    rows: int
    size: int
    vocabulary: int
    with_bias: bool = False
    temperature: float = 1.0
    device: str = "cpu"
    #: Of which all inputs have values.
    rounded_to: torch.dtype = torch.float32

    def run(
        self, dtype: torch.dtype, with_entropy: bool, *, plain: bool = False, chunk_tokens: int = 1024
    ) -> list[torch.Tensor]:
        """Log-probs, entropies (else 0) and the gradients of hidden states, head and bias, in fp64 on the CPU."""
        draw = torch.Generator().manual_seed(0)
        shapes = [(self.rows, self.size), (self.vocabulary, self.size), *[(self.vocabulary,)] * self.with_bias]
        leaves = [
            torch.randn(shape, generator=draw).to(self.rounded_to).to(self.device, dtype).requires_grad_()
            for shape in shapes
        ]
        targets = torch.randint(0, self.vocabulary, (self.rows,), generator=draw).to(self.device)
        targets[::3] = -100
        hidden, weight, bias = leaves if self.with_bias else (*leaves, None)
        if plain:
            logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
            logprobs, entropy = logprobs_from_logits(logits, targets, self.temperature, with_entropy)
        else:
            logprobs, entropy = token_logprobs(
                hidden, weight, targets, self.temperature, chunk_tokens, with_entropy, bias
            )
        entropy = torch.zeros_like(logprobs) if entropy is None else entropy
        steep = torch.linspace(-2, 2, self.rows, dtype=logprobs.dtype, device=self.device)
        (logprobs * steep + 0.3 * entropy * steep.square()).sum().backward()
        return [tensor.detach().double().cpu() for tensor in (logprobs, entropy, *(leaf.grad for leaf in leaves))]


#: Logits, target, and by hand: its log-prob, the entropy, and the gradient of 2 log-prob + 3 entropy.
EXTREME = [
    ([500.0, 0.0, -math.inf], 0, 0.0, 0.0, [0.0, 0.0, 0.0]),
    ([-math.inf, 1.0, 1.0], 1, -math.log(2), math.log(2), [0.0, 1.0, -1.0]),
]


def extreme(logits: list[float], target: int, device: str = "cpu") -> tuple[float, float, list[float]]:
    """Log-prob, entropy, and that gradient, of a head that consists of its bias."""
    bias = torch.tensor(logits, device=device, requires_grad=True)
    zeros, targets = torch.zeros(len(logits), 1, device=device), torch.tensor([target], device=device)
    logprobs, entropy = token_logprobs(zeros[:1], zeros, targets, with_entropy=True, head_bias=bias)
    assert entropy is not None
    (2 * logprobs + 3 * entropy).sum().backward()
    assert bias.grad is not None
    return logprobs.item(), entropy.item(), bias.grad.tolist()
