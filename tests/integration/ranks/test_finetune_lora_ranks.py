"""Adapters on two ranks and every backend train as on one rank, with a KL term against the model without them."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from fakes.rank_group import run_ranks
from peft import PeftModel
from safetensors.torch import load_file

from pipelinerl.finetune.ranks import Ranks

FOLDER = Path(__file__).parent
SCRIPT = FOLDER / "lora_rank_process.py"


@pytest.fixture
def on_one_rank(kit, monkeypatch):
    """Merged weights and KL terms of two steps on one rank of the plain backend."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location("lora_rank_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(kit, Ranks())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["plain", "zero1", "zero2", "zero3", "fsdp"])
def test_w1_two_ranks_train_the_adapters_of_one(kit, tmp_path, on_one_rank, backend):
    run_ranks(SCRIPT, [backend, str(tmp_path)], tmp_path)
    expected, kl = on_one_rank
    initial = dict(kit.model().named_parameters())
    assert max((expected[name] - initial[name]).abs().max().item() for name in expected) > 1e-4
    found = [load_file(tmp_path / f"weights_{rank}.safetensors") for rank in (0, 1)]
    for rank in (0, 1):
        torch.testing.assert_close(found[rank].pop("kl"), torch.tensor(kl), atol=1e-6, rtol=1e-4)
    assert kl[0] == 0.0 and kl[1] > 0
    # Backends that gather shards give all of it to the first rank alone.
    assert found[0].keys() == expected.keys() and (not found[1] or found[1].keys() == expected.keys())
    for weights in found:
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)

    adapter = load_file(tmp_path / "adapter_0.safetensors")
    layers = {name.rpartition(".lora_")[0] for name in adapter}
    assert layers and all(f"{layer}.lora_A.weight" in adapter for layer in layers)
    for layer in layers:
        added = adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        found_there = found[0][f"{layer}.weight"] - initial[f"{layer}.weight"]
        torch.testing.assert_close(added, found_there.detach(), atol=1e-6, rtol=0, msg=layer)

    whole, resumed = (load_file(tmp_path / f"{kind}_0.safetensors") for kind in ("uninterrupted", "resumed"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert any(not torch.equal(tensor, found[0][name]) for name, tensor in whole.items())

    exported = load_file(tmp_path / "current" / "model.safetensors")
    assert exported.keys() == expected.keys()
    with_adapter = PeftModel.from_pretrained(kit.model(), tmp_path / "current" / "adapter").merge_and_unload()
    merged = dict(with_adapter.named_parameters())
    for name, tensor in exported.items():
        assert torch.equal(tensor, found[0][name]), name
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0, msg=name)
