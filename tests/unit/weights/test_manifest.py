"""Manifests of model folders, and whether an update fits a server's model."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from pipelinerl.weights.buffers import adapter_problems, coverage_problems, update_problems
from pipelinerl.weights.manifest import (
    CHECKSUM_BLOCK_BYTES,
    CHECKSUM_BLOCKS,
    ServerModel,
    folder_checksum,
    local_folder,
    read_manifest,
)


@pytest.mark.parametrize("model", ["/nowhere", "no/such/folder", "no-such-organization/no-such-model", "a b"])
def test_a_model_that_is_not_here_has_no_folder(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_folder(model) is None


def test_manifest_is_read_from_the_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    assert read_manifest(tmp_path) == {"a": (2, 3), "b": (4,)}


def test_a_second_copy_of_the_weights_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    save_file({"model.a": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.a": "model-00001-of-00001.safetensors"}}))
    assert read_manifest(tmp_path) == {"model.a": (2, 3)}
    index.write_text("[]")
    with pytest.raises(ValueError, match="no weight_map"):
        read_manifest(tmp_path)


def test_a_folder_without_safetensors_has_no_manifest_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        read_manifest(tmp_path)
    body = json.dumps([1]).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)
    with pytest.raises(ValueError, match="not an object"):
        read_manifest(tmp_path)


EXPECTED = {"embed.weight": (8, 4), "lm_head.weight": (8, 4), "layer.rotary_emb.inv_freq": (2,)}


@pytest.mark.parametrize(
    ("sent", "tied", "name"),
    [
        ({"embed.weight": (8, 4), "lm_head.weight": (8, 4)}, False, None),
        ({"embed.weight": (8, 4)}, True, None),
        ({"embed.weight": (8, 4)}, False, "lm_head.weight"),
        ({"embed.weight": (8, 5)}, True, "embed.weight"),
        ({"embed.weight": (8, 4), "x": (1,)}, True, "x"),
    ],
)
def test_coverage(sent: dict[str, tuple[int, ...]], tied: bool, name: str | None) -> None:
    problems = coverage_problems(EXPECTED, sent, tied)
    assert len(problems) == (name is not None) and all(str(name) in problem for problem in problems)


def test_a_tied_head_that_the_checkpoint_does_not_list_may_be_sent() -> None:
    assert coverage_problems({"embed.weight": (8, 4)}, {"embed.weight": (8, 4), "lm_head.weight": (8, 4)}, True) == []


MODEL = {"model.layers.0.q_proj.weight": (6, 4), "model.layers.0.down_proj.weight": (4, 8), "model.norm.weight": (4,)}
Q = "model.layers.0.q_proj"


def matrices(layer: str, a: tuple[int, int], b: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}


FITTING = matrices(Q, (2, 4), (6, 2)) | matrices("model.layers.0.down_proj", (2, 8), (4, 2))


def test_an_adapter_of_some_layers_fits() -> None:
    assert adapter_problems(MODEL, FITTING, 2) == []
    assert adapter_problems(None, FITTING, 8) == []
    only_q = {name: shape for name, shape in FITTING.items() if ".q_proj." in name}
    assert adapter_problems(MODEL, only_q, 2) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model.norm.weight": (4,)}, "model.norm.weight"),
        ({"model.layers.0.q_proj.lora_B.weight": None}, Q),
        ({"model.layers.0.q_proj.lora_B.weight": (6, 1)}, "[6, 1]"),
        ({"model.layers.0.q_proj.lora_B.weight": (5, 2)}, "[5, 4]"),
        (matrices("model.layers.9.q_proj", (2, 4), (6, 2)), "model.layers.9.q_proj"),
        (matrices(Q, (3, 4), (6, 3)), Q),
    ],
)
def test_what_does_not_fit_is_named(change, name) -> None:
    sent = {name: shape for name, shape in {**FITTING, **change}.items() if shape is not None}
    (problem,) = adapter_problems(MODEL, sent, 2)
    assert name in problem


def save(folder: Path, seed: int = 0, elements: int = 5000, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    save_file({"model.weight": values}, folder / name)
    return folder


def test_copies_are_alike_and_other_weights_are_not(tmp_path: Path) -> None:
    first = folder_checksum(save(tmp_path / "a"))
    assert first is not None and first == folder_checksum(save(tmp_path / "b"))
    assert first != folder_checksum(save(tmp_path / "c", seed=1))
    # A file next to the weights does not count.
    (tmp_path / "b" / "notes.txt").write_text("x")
    assert first == folder_checksum(tmp_path / "b")


def test_a_large_file_is_sampled_to_its_last_byte(tmp_path: Path) -> None:
    folder = save(tmp_path, elements=CHECKSUM_BLOCKS * CHECKSUM_BLOCK_BYTES)
    file = folder / "model.safetensors"
    before, content = folder_checksum(folder), bytearray(file.read_bytes())
    for place in (0, len(content) - 1):
        changed = content.copy()
        changed[place] ^= 1
        file.write_bytes(changed)
        assert folder_checksum(folder) != before
    file.write_bytes(content)
    assert folder_checksum(folder) == before


def test_what_a_server_says_of_its_model_survives_the_wire() -> None:
    model = ServerModel({"a": (2, 3)}, tied=True, dtype="bfloat16", adapter_rank=8, base_checksum="x", rounded=["a"])
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(model))), ServerModel) == model
    assert msgspec.convert({"later": 1}, ServerModel) == ServerModel()


def test_an_adapter_needs_the_same_frozen_model_in_the_same_dtype() -> None:
    model = ServerModel(MODEL, dtype="bfloat16", adapter_rank=2, base_checksum="same")
    assert update_problems(model, FITTING, ["bfloat16"], "same") == []
    assert update_problems(model, FITTING, ["bfloat16"], None) == []
    assert len(update_problems(model, FITTING, ["float32"], "same")) == 1
    # A stale base: another folder than the trainer read.
    assert len(update_problems(model, FITTING, ["bfloat16"], "another")) == 1
    # Of a model whose tensors are not known nothing can be said.
    assert update_problems(ServerModel(), FITTING) == []
