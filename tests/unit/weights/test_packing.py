"""Packed buffers, manifests and sources, with values worked out by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipelinerl.weights.manifest import coverage_problems, read_manifest
from pipelinerl.weights.packing import TensorMeta, meta_from_wire, pack, plan_chunks, unpack
from pipelinerl.weights.source import CollectiveSource, ModuleSource
from pipelinerl.weights.verify import ProbeSequence


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(name, dtype, shape)


def test_a_buffer_is_closed_by_the_tensor_that_makes_it_exceed_the_limit() -> None:
    # 8, 4, 4, 40 and 4 bytes; the limit is 12: 8 + 4 does not exceed it, 8 + 4 + 4 does.
    metas = [meta("a", 2), meta("b", 1), meta("c", 1), meta("d", 10), meta("e", 1)]
    assert [[m.name for m in chunk] for chunk in plan_chunks(metas, 12)] == [["a", "b", "c"], ["d"], ["e"]]
    assert [len(chunk) for chunk in plan_chunks(metas, 10**9)] == [5]
    assert [len(chunk) for chunk in plan_chunks(metas, 0)] == [1] * 5
    assert list(plan_chunks([], 12)) == []


def test_strided_tensors_and_mixed_dtypes_survive_packing() -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = [
        torch.tensor([1.5], dtype=torch.bfloat16),  # two bytes: what follows is not aligned to four
        base.t(),
        base[:, 1],
        torch.tensor(7.0),
        torch.tensor([2**40], dtype=torch.int64),
    ]
    metas = [meta(f"t{i}", *t.shape, dtype=t.dtype) for i, t in enumerate(tensors)]
    buffer = pack(tensors, mark=1)
    # 74 bytes, 6 up to a multiple of 8, and the seal
    assert buffer.numel() == 2 + 48 + 12 + 4 + 8 + 6 + 8
    for (name, got), expected in zip(unpack(buffer, metas), tensors, strict=True):
        assert torch.equal(got, expected), name


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="packed buffer: got 12 bytes, expected 16"):
        unpack(torch.zeros(12, dtype=torch.uint8), [meta("a", 2)])


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "message"),
    [(["a"], [], [[1]], "equal numbers"), (["a"], ["float99"], [[1]], "float99"), (["a"], ["nn"], [[1]], "nn")],
)
def test_bad_descriptions_are_refused(names, dtypes, shapes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        meta_from_wire(names, dtypes, shapes)


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
    ("sent", "tied", "problems"),
    [
        ({"embed.weight": (8, 4), "lm_head.weight": (8, 4)}, False, []),
        ({"embed.weight": (8, 4)}, True, []),
        ({"embed.weight": (8, 4)}, False, ["1 tensors are left out: lm_head.weight"]),
        ({"embed.weight": (8, 5)}, True, ["embed.weight: got shape [8, 5], the model has [8, 4]"]),
        ({"embed.weight": (8, 4), "x": (1,)}, True, ["1 tensors are unknown to the model: x"]),
    ],
)
def test_coverage(sent: dict[str, tuple[int, ...]], tied: bool, problems: list[str]) -> None:
    assert coverage_problems(EXPECTED, sent, tied) == problems


def test_a_tied_head_that_the_checkpoint_does_not_list_may_be_sent() -> None:
    assert coverage_problems({"embed.weight": (8, 4)}, {"embed.weight": (8, 4), "lm_head.weight": (8, 4)}, True) == []


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(2)


def test_a_module_source_casts_renames_and_sends_shared_parameters_once() -> None:
    module = Tied()
    names = {"embed.weight": "model.embed.weight", "norm.weight": "norm.weight", "norm.bias": None}
    source = ModuleSource(module, dtype=torch.bfloat16, bucket_bytes=1, rename=lambda name: names[name])
    assert source.metadata() == [
        TensorMeta("model.embed.weight", torch.bfloat16, (3, 2)),
        TensorMeta("norm.weight", torch.bfloat16, (2,)),
    ]
    for _ in range(2):  # every pass is fresh
        buckets = list(source.buckets())
        assert [[name for name, _ in bucket] for bucket in buckets] == [["model.embed.weight"], ["norm.weight"]]
    with torch.no_grad():
        module.embed.weight.fill_(2)
    assert (next(source.buckets())[0][1] == 2).all()


def test_a_collective_source_makes_followers_take_part_in_every_pass() -> None:
    flags: list[bool] = []
    leader = CollectiveSource([meta("a", 1)], lambda: [[("a", torch.ones(1))]], lambda flag: flags.append(flag) or flag)
    for _ in range(2):
        assert [name for bucket in leader.buckets() for name, _ in bucket] == ["a"]
    leader.done()
    assert flags == [True, True, False]

    passes: list[int] = []
    heard = iter(flags)
    follower = CollectiveSource([meta("a", 1)], lambda: passes.append(1) or iter([[]]), lambda _: next(heard))
    follower.follow()
    assert len(passes) == 2


@pytest.mark.parametrize(("ids", "logprobs"), [([1], []), ([1, 2], []), ([1, 2], [0.1, 0.2])])
def test_probe_sequences_must_fit(ids: list[int], logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match="one log-prob fewer"):
        ProbeSequence(ids, logprobs)
