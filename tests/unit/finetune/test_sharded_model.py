"""Parts of a model on one rank: the values of the files, tied as they were, and a trial that leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.families import random_model
from torch.distributed.tensor import DTensor

from pipelinerl.config import RunConfig
from pipelinerl.finetune.model import load_language_model
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks, ensure_process_group
from pipelinerl.finetune.sharded_model import (
    has_parts,
    loaded_in_parts,
    replace_parameters,
    shards_weights,
    whole_for_trial,
)

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def deepspeed(stage: int) -> dict[str, str]:
    return {"type": "deepspeed", "config": f"deepspeed_stage{stage}_bf16"}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ({"type": "plain"}, False),
        *((deepspeed(stage), stage == 3) for stage in (1, 2, 3)),
        ({"type": "fsdp"}, True),
    ],
)
def test_which_backends_shard_weights(tmp_path: Path, backend: Any, expected: bool) -> None:
    assert shards_weights(RunConfig(output_dir=str(tmp_path), backend=backend)) is expected


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    random_model("qwen2", tie_word_embeddings=True, vocab_size=3001, pad_token_id=3000).save_pretrained(tmp_path)
    ensure_process_group(Ranks())
    yield tmp_path
    dist.destroy_process_group()


def in_parts(folder: Path) -> PolicyModel:
    with loaded_in_parts(Ranks()):
        return PolicyModel(load_language_model(str(folder), "sdpa"))


def test_parts_are_the_values_of_the_files(folder: Path) -> None:
    whole, policy = PolicyModel(load_language_model(str(folder), "sdpa")), in_parts(folder)
    parts = dict(policy.named_parameters())
    # A tied head is no parameter of its own.
    assert parts.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        part = parts[name]
        assert isinstance(part, DTensor) and part.shape == parameter.shape and part.requires_grad
        assert torch.equal(part.full_tensor(), parameter), name
    for (name, buffer), (_, own) in zip(whole.named_buffers(), policy.named_buffers(), strict=True):
        assert torch.equal(buffer, own), name


def test_a_trial_computes_on_a_small_vocabulary_and_leaves_parts(folder: Path) -> None:
    whole, policy = PolicyModel(load_language_model(str(folder), "sdpa")), in_parts(folder)
    before = {name: id(parameter) for name, parameter in policy.named_parameters()}
    batch = token_batch([IDS], torch.device("cpu"))
    with torch.no_grad():
        logits = whole.language_model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
        with whole_for_trial(policy, Ranks()):
            assert not any(isinstance(p, DTensor) for p in policy.language_model.model.norm.parameters())
            found = policy(*policy.placed(batch, torch.device("cpu"))).logprobs[0, :-1]
    # The softmax is over the first 1024 tokens.
    expected = logits[0, :-1, :1024].log_softmax(-1).gather(1, batch.targets[0, :-1, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert {name: id(parameter) for name, parameter in policy.named_parameters()} == before
    model = policy.language_model
    assert (model.config.vocab_size, model.get_input_embeddings().padding_idx) == (3001, 3000)
    assert has_parts(policy)


def test_tied_parameters_are_replaced_everywhere(folder: Path) -> None:
    model = load_language_model(str(folder), "sdpa")
    replace_parameters(model, lambda name, p: torch.nn.Parameter(p.detach() + 1) if "embed" in name else None)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not has_parts(model)
