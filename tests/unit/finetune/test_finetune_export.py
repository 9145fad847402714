"""The model as a Hugging Face folder: written shard by shard while it is gathered, whatever the disk does."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipelinerl.finetune import shard_files
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.shard_files import ShardWriter
from pipelinerl.finetune.weight_names import in_buckets, sent_parameters, tensor_metas
from pipelinerl.weights.source import CollectiveSource


class Gathered:
    """A sharded model of one rank: `passes` counts announced passes, `taken` the buckets that were read."""

    def __init__(self, policy):
        self.passes, self.taken = [], 0
        parameters = sent_parameters(policy)

        def gather():
            for part in in_buckets(parameters, torch.float32, 4096):
                self.taken += 1
                yield [(name, parameter.detach()) for name, parameter in part]

        def announce(flag):
            self.passes.append(flag)
            return flag

        self.source = CollectiveSource(tensor_metas(parameters, torch.float32), gather, announce)
        self.buckets = len(list(in_buckets(parameters, torch.float32, 4096)))


@pytest.fixture
def exporter(kit, tmp_path):
    return ModelExporter(tmp_path / "out", str(kit.tokenizer(tmp_path / "tokenizer")), Ranks(), max_shard_bytes=20_000)


@pytest.mark.parametrize("tied", [True, False])
def test_several_files_with_an_index_are_the_model(kit, exporter, tied):
    policy = kit.policy(tied=tied)
    folder = exporter.export(3, policy, Gathered(policy).source)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    weights = dict(sent_parameters(policy))
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in weights.values())
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in policy.language_model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_one_file_has_no_index(kit, tmp_path):
    policy = kit.policy(with_values=True)
    exporter = ModelExporter(tmp_path / "out", str(kit.tokenizer(tmp_path / "tokenizer")), Ranks())
    source = PlainBackend(policy, kit.config(), Ranks()).weight_source(torch.bfloat16, with_value_head=True)
    folder = exporter.export(1, policy, source)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert load_file(folder / "value_head" / "model.safetensors").keys() == {"weight", "bias"}


def test_w2_at_most_one_shard_waits_in_memory(kit, exporter, monkeypatch):
    policy = kit.policy()
    waiting = []
    add = ShardWriter.add

    def watched(self, name, tensor):
        add(self, name, tensor)
        waiting.append(sum(kept.numel() * kept.element_size() for kept in self._pending.values()))

    monkeypatch.setattr(ShardWriter, "add", watched)
    exporter.export(1, policy, Gathered(policy).source)
    assert 0 in waiting and max(waiting) <= 20_000


@pytest.mark.parametrize("fails_at", ["start", "file"])
def test_a_full_disk_is_told_when_the_pass_is_over(kit, exporter, monkeypatch, tmp_path, fails_at):
    """Other ranks take part in the whole pass: to leave it early would leave them waiting."""
    policy = kit.policy()

    def full(*arguments):
        raise OSError("no space left on device")

    if fails_at == "start":
        monkeypatch.setattr("pipelinerl.finetune.model_export.start_folder", full)
    else:
        monkeypatch.setattr(shard_files, "write_tensors", full)
    gathered = Gathered(policy)
    with pytest.raises(OSError, match="no space left"):
        exporter.export(1, policy, gathered.source)
    assert gathered.taken == gathered.buckets and gathered.passes == [True, False]
    assert not (tmp_path / "out" / "current").exists()


def test_missing_tensors_are_named(tmp_path, kit):
    metas = tensor_metas(sent_parameters(kit.policy()), torch.float32)
    writer = ShardWriter(tmp_path, metas)
    with pytest.raises(ValueError, match=r"no tensors for \['model.embed_tokens.weight'"):
        writer.close()
