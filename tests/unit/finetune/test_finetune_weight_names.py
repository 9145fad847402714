"""What servers get: checkpoint names, a tied head once, no value head."""

import pytest
import torch
from safetensors import safe_open

from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.ranks import Ranks


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_checkpoint(kit, tmp_path, tied):
    policy = kit.policy(tied=tied, with_values=True)
    policy.language_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = set(file.keys())
    backend = PlainBackend(policy, kit.config(), Ranks())
    source = backend.weight_source(torch.bfloat16)
    assert {meta.name for meta in source.metadata()} == expected
    exported = {meta.name for meta in backend.weight_source(torch.bfloat16, with_value_head=True).metadata()}
    assert exported - expected == {"value_head.weight", "value_head.bias"}
    assert ("lm_head.weight" in expected) is not tied
    assert {tensor.dtype for bucket in source.buckets() for _, tensor in bucket} == {torch.bfloat16}
