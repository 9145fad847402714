"""Adapters on two ranks (DDP over gloo) train as on one, with a KL term against the model without them."""

import importlib.util
from pathlib import Path

import torch
from fakes.rank_group import run_ranks
from safetensors.torch import load_file

from pipelinerl.finetune.ranks import Ranks

SCRIPT = Path(__file__).with_name("lora_rank_process.py")


def test_two_ranks_train_the_adapters_of_one(kit, tmp_path):
    spec = importlib.util.spec_from_file_location("lora_rank_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = module.train(kit, Ranks())
    run_ranks(SCRIPT, [str(tmp_path)], tmp_path)
    found = [load_file(tmp_path / f"weights_{rank}.safetensors") for rank in (0, 1)]
    initial = dict(kit.model().named_parameters())
    assert max((expected[name] - initial[name]).abs().max().item() for name in expected) > 1e-4
    for name, tensor in expected.items():
        assert torch.equal(found[0][name], found[1][name]), name
        torch.testing.assert_close(found[0][name], tensor, atol=1e-5, rtol=0, msg=name)
