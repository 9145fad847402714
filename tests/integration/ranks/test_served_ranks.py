"""Two ranks compute with the weights that servers in bf16 have, whatever holds the weights of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes.families import random_model
from fakes.rank_group import run_ranks

from pipelinerl.finetune.tensor_files import read_tensors

SCRIPT = Path(__file__).with_name("served_process.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "computed"),
    [
        ("plain", "bfloat16"),
        ("fsdp", "bfloat16"),
        ("fsdp", "float32"),
        ("fsdp_bf16", "bfloat16"),
        ("zero2", "bfloat16"),
    ],
)
def test_ranks_compute_with_the_weights_that_they_send(tmp_path: Path, backend: str, computed: str) -> None:
    run_ranks(SCRIPT, [backend, computed, str(tmp_path)], tmp_path)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    # Layers in bf16 throughout add up in bf16 too, so only those with fp32 parameters are the same to the last bit.
    exact = backend in ("plain", "fsdp")
    assert max(results[0]["differences"]) <= (0.0 if exact else 0.1), results[0]
    assert results[0]["resumes"]
    assert results[0]["has_masters"] or backend == "zero2"
    if backend == "plain":
        # Also though they started from other weights than the first rank's, which all got.
        first, second = (read_tensors(tmp_path / f"masters_{rank}.safetensors") for rank in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_a_sharded_mixture_of_experts_is_sent_as_its_checkpoint(tmp_path: Path, backend: str) -> None:
    """With a bias of the router, which is a buffer: no backend shards it."""
    family = "deepseek_v3"
    run_ranks(Path(__file__).with_name("expert_process.py"), [backend, family, str(tmp_path)], tmp_path)
    random_model(family).save_pretrained(tmp_path / "model")
    expected, sent = read_tensors(tmp_path / "model"), read_tensors(tmp_path / "sent.safetensors")
    assert expected.keys() == sent.keys()
    assert all(torch.equal(expected[name], sent[name]) for name in expected)
