"""The model as a Hugging Face folder: written shard by shard while it is gathered, whatever the disk does."""

import json
import shutil
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipelinerl.domains.guessing import turn_messages
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_language_model
from pipelinerl.finetune.model_export import ModelExporter, tokenizer_difference
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.served_weights import checkpoint_name
from pipelinerl.llm.tokens import load_tokenizer
from pipelinerl.tiny.tokenizer import build_tokenizer
from pipelinerl.weights.buffers import ModuleSource, WeightSource, plan_chunks


class Gathered:
    """A sharded model of one rank: `passes` counts announced passes, `taken` the tensors that were read."""

    def __init__(self, policy, dtype=torch.float32):
        self.passes, self.taken = [], 0
        plain = ModuleSource(policy, dtype, checkpoint_name)
        tensors = dict(named for bucket in plain.buckets() for named in bucket)

        def gather():
            for chunk in plan_chunks(plain.metadata(), 4096):
                self.taken += len(chunk)
                yield [(meta.name, tensors[meta.name]) for meta in chunk]

        def announce(flag):
            self.passes.append(flag)
            return flag

        self.source = WeightSource(plain.metadata(), gather, announce)


@pytest.fixture
def exporter(kit, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.finetune.model_export.MAX_SHARD_BYTES", 20_000)
    return ModelExporter(tmp_path / "out", str(kit.tokenizer(tmp_path / "tokenizer")), Ranks())


@pytest.mark.parametrize("tied", [True, False])
def test_several_files_with_an_index_are_the_model(kit, exporter, tied):
    """X1: an export reloads equal."""
    policy = kit.policy(tied=tied)
    folder = exporter.export(3, policy, Gathered(policy).source)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    weights = {checkpoint_name(name): p for name, p in policy.named_parameters()}
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
    gathered, written = Gathered(kit.policy()), []

    def watched(file, tensors, metadata=None):
        written.append((gathered.taken, sum(tensor.nbytes for tensor in tensors.values())))

    monkeypatch.setattr("pipelinerl.finetune.model_export.write_tensors", watched)
    exporter.export(1, kit.policy(), gathered.source)
    # Only the shard that overflows by its last tensor is larger.
    assert len(written) > 2 and all(size <= 20_000 + 6_400 for _, size in written)
    assert written[0][0] < written[-1][0] == len(gathered.source.metadata())


@pytest.mark.parametrize("fails_at", ["start", "file"])
def test_a_full_disk_is_told_when_the_pass_is_over(kit, exporter, monkeypatch, tmp_path, fails_at):
    """Other ranks take part in the whole pass: to leave it early would leave them waiting."""
    policy = kit.policy()

    def full(*arguments):
        raise OSError("no space left on device")

    if fails_at == "start":
        monkeypatch.setattr("pipelinerl.finetune.model_export.start_folder", full)
    else:
        monkeypatch.setattr("pipelinerl.finetune.model_export.write_tensors", full)
    gathered = Gathered(policy)
    with pytest.raises(OSError, match="no space left"):
        exporter.export(1, policy, gathered.source)
    assert gathered.taken == len(gathered.source.metadata()) and gathered.passes == [True, False]
    assert not (tmp_path / "out" / "current").exists()


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


CUSTOM_CODE = {
    "configuration_own": """
        from transformers import LlamaConfig

        class OwnConfig(LlamaConfig):
            model_type = "own_llama"
    """,
    "modeling_own": """
        from transformers import LlamaForCausalLM

        from .configuration_own import OwnConfig

        class OwnForCausalLM(LlamaForCausalLM):
            config_class = OwnConfig
    """,
    "tokenization_own": """
        from transformers import PreTrainedTokenizerFast

        class OwnTokenizerFast(PreTrainedTokenizerFast):
            pass
    """,
}


def save_custom_model(kit, folder):
    """A model whose folder brings the code of configuration, model and tokenizer along."""
    kit.tokenizer(folder)
    for name, code in CUSTOM_CODE.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    add_to_json(
        folder / "config.json",
        model_type="own_llama",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )
    add_to_json(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizerFast",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]},
    )
    return folder


def add_to_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_model_with_code_of_its_own_is_exported_with_it(kit, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = save_custom_model(kit, tmp_path / "source")
    policy = PolicyModel(load_language_model(str(source), "sdpa", trust_remote_code=True))
    exporter = ModelExporter(tmp_path / "out", str(source), Ranks(), trust_remote_code=True)
    folder = exporter.export(1, policy, PlainBackend(policy, kit.config(), Ranks()).weight_source(torch.float32))
    shutil.rmtree(source)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert (type(model).__name__, type(model.config).__name__) == ("OwnForCausalLM", "OwnConfig")
    for name, tensor in policy.language_model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert type(load_tokenizer(str(folder), trust_remote_code=True)).__name__ == "OwnTokenizerFast"


def test_a_model_with_code_of_its_own_needs_trust(kit, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = save_custom_model(kit, tmp_path / "source")
    with pytest.raises(ConfigError, match=r"custom code.*set finetune\.trust_remote_code=true"):
        load_language_model(str(source), "sdpa")
    assert not (tmp_path / "modules").exists()


def test_the_tiny_model_has_the_same_tokens_everywhere(kit, tmp_path):
    tokenizer = build_tokenizer(100)
    tokenizer.save_pretrained(tmp_path)
    kit.policy().language_model.config.save_pretrained(tmp_path)
    assert tokenizer_difference(load_tokenizer(str(tmp_path)), tmp_path) is None
    others = AutoTokenizer.from_pretrained(tmp_path)
    assert type(others).__name__ == "Qwen2Tokenizer"
    for messages in (turn_messages(1, 100, guesses, 40) for guesses in ([], [50], [50, 25, 37])):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = others.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer.encode(text, add_special_tokens=False) and len(ids) < 30
        assert others.decode(ids) == text


def test_a_tokenizer_that_other_programs_replace_is_told(kit, tmp_path):
    folder = kit.tokenizer(tmp_path)
    kit.policy().language_model.config.save_pretrained(folder)
    assert "AutoTokenizer" in tokenizer_difference(load_tokenizer(str(folder)), folder)
