"""What servers get: checkpoint names, a tied head once, no value head, and buckets of bounded size."""

import pytest
import torch

from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_names import in_buckets, sent_parameters, tensor_metas


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_checkpoint(kit, tmp_path, tied):
    from safetensors import safe_open

    policy = kit.policy(tied=tied, with_values=True)
    policy.language_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = set(file.keys())
    source = PlainBackend(policy, kit.config(), Ranks()).weight_source(torch.bfloat16)
    assert {meta.name for meta in source.metadata()} == expected
    assert {name for name, _ in sent_parameters(policy)} == expected
    assert ("lm_head.weight" in expected) is not tied
    assert {tensor.dtype for bucket in source.buckets() for _, tensor in bucket} == {torch.bfloat16}


def test_an_export_has_the_value_head_too(kit):
    policy = kit.policy(with_values=True)
    names = {name for name, _ in sent_parameters(policy, with_value_head=True)}
    assert names - {name for name, _ in sent_parameters(policy)} == {"value_head.weight", "value_head.bias"}


def test_w2_buckets_are_bounded_and_complete(kit):
    parameters = sent_parameters(kit.policy())
    limit = 4096
    buckets = list(in_buckets(parameters, torch.float32, limit))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in parameters]
    sizes = [[meta.num_bytes for meta in tensor_metas(bucket, torch.float32)] for bucket in buckets]
    assert len(buckets) > 3
    # A bucket is closed as soon as it is full: without its last tensor it is below the limit.
    assert all(sum(size[:-1]) < limit for size in sizes)
