"""What servers and exports get are the tensors of the checkpoint on the disk, whatever a family keeps in memory."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.families import FAMILIES, IDS, random_model
from fakes.random_model import save_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.model import load_language_model
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import check_checkpoint


def sent(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = PlainBackend(PolicyModel(model), FinetuneConfig(), Ranks()).weight_source(dtype)
    tensors = [named for bucket in source.buckets() for named in bucket]
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    assert len(dict(tensors)) == len(tensors)
    return dict(tensors)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_w1_what_is_sent_is_the_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for own in (model, load_language_model(str(tmp_path), "eager")):
        got = sent(own)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
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
        "qwen3_moe": {"model.layers.1.mlp.experts.3.up_proj.weight": [32, 32]},
        "mixtral": {"model.layers.1.block_sparse_moe.experts.3.w2.weight": [32, 64]},
        "granitemoe": {"model.layers.1.block_sparse_moe.input_linear.weight": [4, 128, 32]},
        "deepseek_v3": {
            "model.layers.1.mlp.experts.3.gate_proj.weight": [32, 32],
            "model.layers.1.mlp.gate.e_score_correction_bias": [4],
        },
        "gpt_neox": {"embed_out.weight": [64, 32]},
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
