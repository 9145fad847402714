"""What servers and exports get are the tensors of the checkpoint on the disk, whatever a family keeps in memory."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.families import IDS, KINDS, random_model
from fakes.random_model import save_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipelinerl.config.finetune import FinetuneConfig, LoraConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.model import load_language_model
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.served_weights import CheckpointForm
from pipelinerl.finetune.weight_sync import check_checkpoint


def sent(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = PlainBackend(PolicyModel(model), FinetuneConfig(), Ranks()).weight_source(dtype)
    tensors = [named for bucket in source.buckets() for named in bucket]
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    assert len(dict(tensors)) == len(tensors)
    return dict(tensors)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_w1_what_is_sent_is_the_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for own in (model, load_language_model(str(tmp_path), "eager")):
        got = sent(own)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("family", KINDS)
def test_x1_an_export_reloads_with_equal_logits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.finetune.model_export.MAX_SHARD_BYTES", 20_000)
    model = random_model(family)
    save_tokenizer(tmp_path / "tokenizer")
    policy = PolicyModel(model)
    backend = PlainBackend(policy, FinetuneConfig(), Ranks())
    exporter = ModelExporter(tmp_path, str(tmp_path / "tokenizer"), Ranks())
    folder = exporter.export(1, policy, backend.export_source())
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        ids = torch.tensor([IDS])
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("family", "shapes"),
    {
        "qwen3_moe": {"model.layers.1.mlp.experts.3.up_proj.weight": [32, 64]},
        "mixtral": {"model.layers.1.block_sparse_moe.experts.3.w2.weight": [64, 64]},
        "granitemoe": {"model.layers.1.block_sparse_moe.input_linear.weight": [4, 128, 64]},
        "deepseek_v3": {
            "model.layers.1.mlp.experts.3.gate_proj.weight": [32, 64],
            "model.layers.1.mlp.gate.e_score_correction_bias": [4],
        },
        "gpt_neox": {"embed_out.weight": [200, 64]},
    }.items(),
)
def test_names_and_shapes_of_published_checkpoints(family: str, shapes: dict[str, list[int]]) -> None:
    got = sent(random_model(family), torch.bfloat16)
    assert {name: list(got[name].shape) for name in shapes} == shapes
    # Buffers keep their own dtype: servers add this one to fp32 scores.
    assert {tensor.dtype for name, tensor in got.items() if "correction_bias" not in name} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in got.items() if "correction_bias" in name} <= {torch.float32}


@pytest.mark.parametrize(
    ("lost", "is_refused"), [("mlp.gate.e_score_correction_bias", False), ("mlp.gate.weight", True)]
)
def test_a_buffer_that_the_checkpoint_lacks_is_not_sent_and_a_parameter_is_missed(
    lost: str, is_refused: bool, tmp_path: Path
) -> None:
    random_model("glm4_moe").save_pretrained(tmp_path)
    name = f"model.layers.1.{lost}"
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_language_model(str(tmp_path), "eager")
    backend = PlainBackend(PolicyModel(model), FinetuneConfig(), Ranks())
    with pytest.raises(ConfigError, match=name) if is_refused else nullcontext():
        check_checkpoint(backend, str(tmp_path))
    if not is_refused:
        assert {meta.name for meta in backend.weight_source(torch.float32).metadata()} == tensors.keys()


@pytest.mark.parametrize("damage", ["none", "more", "fewer", "shape"])
def test_a_checkpoint_with_other_tensors_is_refused(damage: str, tmp_path: Path) -> None:
    model = random_model("glm4_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    changed = {"none": {}, "more": {f"{name}_scale_inv": torch.ones(1)}, "shape": {name: torch.ones(2, 2)}}
    tensors |= changed.get(damage, {})
    # What predicts further tokens is no part of the model that is trained.
    tensors |= {"mtp.norm.weight": torch.ones(1), "model.layers.2.eh_proj.weight": torch.ones(1)}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    if damage == "fewer":
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    backend = PlainBackend(PolicyModel(model), FinetuneConfig(), Ranks())
    with nullcontext() if damage == "none" else pytest.raises(ConfigError, match=name):
        check_checkpoint(backend, str(tmp_path))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits


#: peft refuses some layers of models with a recurrent state, such as the one that follows it.
TARGETS = {"nemotron_h": ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj"]}


@pytest.mark.parametrize("sync", ["merged", "adapter"])
@pytest.mark.parametrize(
    "family",
    [*("qwen3_moe", "mixtral", "deepseek_v3", "minimax_m2", "granitemoe"), *("gpt_neox", "nemotron_h", "llama4_text")],
)
def test_an_adapter_has_the_names_of_the_checkpoint_too(family: str, sync: str, tmp_path: Path) -> None:
    """A server gets merged weights, or adds B A to the tensors of its checkpoint."""
    model = random_model(family)
    model.save_pretrained(tmp_path)
    policy = PolicyModel(load_language_model(str(tmp_path), "eager"))
    settings = LoraConfig(enabled=True, r=4, alpha=10.0, sync=sync, target_modules=TARGETS.get(family, []))
    add_adapters(policy, settings, "base")
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(1))
    backend = PlainBackend(policy, FinetuneConfig(), Ranks())
    check_checkpoint(backend, str(tmp_path))
    source = backend.adapter_source if policy.sends_adapter else backend.weight_source
    got = dict(named for bucket in source(torch.float32).buckets() for named in bucket)
    tensors = load_file(tmp_path / "model.safetensors") if policy.sends_adapter else got
    for name in [name for name in got if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        tensors[f"{layer}.weight"] += got[f"{layer}.lora_B.weight"] @ got[name]
    served = type(model).from_pretrained(
        None, config=model.config, state_dict=tensors, dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(logits(served), logits(policy.language_model), atol=1e-5, rtol=0)
    assert (logits(served) - logits(model)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "names"), [("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]), ("phimoe", ["router"]), ("mamba2", [])]
)
def test_layers_that_get_no_adapter_are_refused(family: str, names: list[str]) -> None:
    """Experts in one tensor, a router that returns more than a product, and what peft refuses."""
    with pytest.raises(ConfigError) as found:
        add_adapters(PolicyModel(random_model(family)), LoraConfig(enabled=True, target_modules=names), "base")
    assert found.value.key == "finetune.lora.target_modules"


def test_an_adapter_of_a_matrix_that_the_checkpoint_has_in_parts_is_refused() -> None:
    model = random_model("qwen3_moe")
    form = CheckpointForm(model, [name for name, _ in model.named_parameters()])
    assert form.renamed("model.layers.0.self_attn.q_proj.weight") == "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ConfigError) as found:
        form.renamed("model.layers.0.mlp.experts.gate_up_proj")
    assert found.value.key == "finetune.lora.sync"
