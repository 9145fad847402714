"""The head's Triton kernels in Triton's interpreter, which it takes from the environment when it is first imported:
`TRITON_INTERPRET=1 python -m fakes.interpreted_head` prints a JSON list of errors against fp64, one list for a case."""

from __future__ import annotations

import json
import sys

import torch
from fakes.head_case import HeadCase

from pipelinerl.finetune import head_kernels, policy

INF = float("inf")
CASES = [
    (HeadCase(9, 6, vocabulary, with_bias, temperature), with_entropy)
    for vocabulary, with_bias, temperature in ((5000, False, 0.7), (37, True, 1.0))
    for with_entropy in (False, True)
]
#: A certain token, impossible ones, and what is not a number.
EXTREME = [[500.0, 0.0, -INF], [-INF, 1.0, 1.0], [float("nan"), 0.0, 0.0]]


def main() -> None:
    head_kernels.try_out(torch.device("cpu"))
    setattr(policy, "head_kernels", lambda logits: head_kernels)  # noqa: B010
    errors = []
    for case, with_entropy in CASES:
        exact = case.run(torch.float64, with_entropy, plain=True)
        found = case.run(torch.float32, with_entropy, chunk_tokens=4)
        pairs = zip(found, exact, strict=True)
        errors.append([float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)) for ours, theirs in pairs])
    extreme = head_kernels.statistics(torch.tensor(EXTREME), torch.tensor([0, 1, 1]), 1.0, True)
    json.dump({"errors": errors, "extreme": [values.tolist() for values in extreme]}, sys.stdout)


if __name__ == "__main__":
    main()
