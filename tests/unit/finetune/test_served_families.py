"""In bf16 every family computes with the weights that servers have, whatever its layers do with them."""

from __future__ import annotations

import copy

import pytest
import torch
from fakes.families import FAMILIES, KINDS, logprobs, random_model

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.experts import use_own_experts
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks

BF16 = torch.bfloat16


@pytest.mark.parametrize("own_experts", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "family", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in KINDS)]
)
def test_a_model_with_the_sent_weights_has_the_same_logprobs(family: str, tied: bool, own_experts: bool) -> None:
    """X1: for every family."""
    model = random_model(family, tie_word_embeddings=tied)
    if own_experts:
        use_own_experts(model)
    policy = PolicyModel(copy.deepcopy(model), compute_dtype=BF16, served_dtype=BF16)
    received = PolicyModel(model, compute_dtype=BF16)
    before = logprobs(received)
    source = PlainBackend(policy, FinetuneConfig(), Ranks()).weight_source(BF16)
    sent = dict(named for bucket in source.buckets() for named in bucket)
    # The tensors are those of a checkpoint.
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=sent, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    after = logprobs(received)
    assert torch.equal(logprobs(policy), after)
    # Else the test could not tell.
    assert not torch.equal(before, after)
