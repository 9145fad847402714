"""Faults that the log-prob probe and the on-policy check of a step cannot see, so that other checks stay.

Found instead by: the checksum of every buffer (`test_buffers`, `test_sync`), the checksum of the frozen model's folder
(`test_manifest`), names, shapes and complete layers (`test_manifest`, `contract/test_transfer`,
`integration/test_weight_update`).
"""

from __future__ import annotations

import pytest
import torch
from fakes.random_model import model_logprobs, random_ids, random_model

from pipelinerl.finetune.loop import MAX_ON_POLICY_DIFF
from pipelinerl.finetune.probe import PROBE_TOLERANCE

#: What AdamW changes in a weight of 0.02 in one step at a learning rate of 1e-5, and in 100.
STEP, HUNDRED_STEPS = 1e-5, 1e-3


@pytest.mark.parametrize(
    ("fault", "change"),
    [("a buffer of the update before", STEP), ("a layer left out", STEP), ("another frozen model", HUNDRED_STEPS)],
)
def test_w1_small_faults_are_below_the_tolerances_of_probe_and_step(fault: str, change: float) -> None:
    model, ids = random_model(seed=3), random_ids(80, seed=1)
    right = torch.tensor(model_logprobs(model, ids))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if fault == "another frozen model" or "layers.1.mlp" in name:
                parameter += change * torch.randn(parameter.shape, generator=generator).sign()
    difference = (torch.tensor(model_logprobs(model, ids)) - right).abs().mean().item()
    assert 0 < difference < PROBE_TOLERANCE["bfloat16"] < MAX_ON_POLICY_DIFF


def test_w1_zeros_in_a_buffer_are_above_them() -> None:
    """A skipped broadcast of a whole layer shows at the next probe, but probes do not follow every update."""
    model, ids = random_model(seed=3), random_ids(80, seed=1)
    right = torch.tensor(model_logprobs(model, ids))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or "layers" in name:
                parameter.zero_()
    difference = (torch.tensor(model_logprobs(model, ids)) - right).abs().mean().item()
    assert difference > PROBE_TOLERANCE["bfloat16"]
