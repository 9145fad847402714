"""Adapters: only they are trained and saved; servers and exports get merged weights that are exactly the policy."""

import json
import shlex

import peft
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.config.load import merge_command
from pipelinerl.errors import ConfigError
from pipelinerl.finetune import model as loading
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState
from pipelinerl.finetune.lora import adapters_off, add_adapters
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.model_check import forward_difference, token_batch
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import STATE, read_tensors, write_tensors


def adapted(kit, tied=False, with_values=False, dtype=torch.float32, **lora):
    policy = kit.policy(tied=tied, with_values=with_values, compute_dtype=dtype)
    torch.manual_seed(3)
    add_adapters(policy, LoraConfig(enabled=True, r=4, alpha=10.0, **lora), "base")
    return policy


def train(kit, policy, steps=2, **config):
    settings = kit.config(**config)
    backend = PlainBackend(policy, settings, Ranks())
    runner = StepRunner(backend, settings, Ranks())
    for step in range(1, steps + 1):
        runner.run(kit.batch(kit.samples(8, seed=step), step=step))
    return backend


def logits(model, ids=(3, 5, 7, 9, 11)):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits


def received(source):
    return {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_w1_merged_weights_are_the_policy(kit, tied, bias):
    policy = adapted(kit, tied, bias=bias)
    backend = train(kit, policy)
    plain = kit.model(tied=tied)
    before = logits(plain)
    source = backend.weight_source(torch.float32)
    weights = received(source)
    assert set(weights) == {name for name, _ in plain.named_parameters()}
    assert [(meta.name, meta.shape) for meta in source.metadata()] == [(n, tuple(t.shape)) for n, t in weights.items()]
    plain.load_state_dict(weights, strict=False)
    assert (logits(plain) - before).abs().max() > 1e-2
    torch.testing.assert_close(logits(plain), logits(policy.language_model), atol=1e-5, rtol=0)


def test_a_merged_matrix_by_hand(kit):
    policy = adapted(kit, target_modules=["q_proj"])
    layer = policy.language_model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    merged = received(PlainBackend(policy, kit.config(), Ranks()).weight_source(torch.float32))
    column_sums = layer.lora_A["default"].weight.sum(0)  # B is constant: every row of B @ A is 0.5 * column sum of A
    expected = layer.base_layer.weight + 10.0 / 4 * 0.5 * column_sums
    torch.testing.assert_close(merged["model.layers.0.self_attn.q_proj.weight"], expected, atol=1e-6, rtol=0)


def test_w2_only_adapters_are_trained_and_merging_holds_one_tensor_at_a_time(kit):
    policy = adapted(kit)
    frozen = {n: p.detach().clone() for n, p in policy.named_parameters() if not p.requires_grad}
    backend = train(kit, policy)
    assert all(torch.equal(dict(policy.named_parameters())[name], tensor) for name, tensor in frozen.items())
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    source = backend.weight_source(torch.float32)
    assert all(len(bucket) == 1 for bucket in source.buckets())


def test_adapters_off_is_the_model_that_training_started_from(kit):
    policy = adapted(kit)
    before = logits(kit.model())
    assert torch.equal(logits(policy.language_model), before)
    train(kit, policy)
    after = logits(policy.language_model)
    with adapters_off(policy):
        assert torch.equal(logits(policy.language_model), before)
    assert torch.equal(logits(policy.language_model), after)
    assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(kit, reentrant):
    plain, checkpointed = adapted(kit), adapted(kit)
    checkpointed.language_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        checkpointed.language_model.enable_input_require_grads()
    train(kit, plain)
    train(kit, checkpointed)
    for (name, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0, msg=name)


def test_a_value_head_is_trained_with_the_adapters_and_never_sent(kit):
    policy = adapted(kit, with_values=True)
    rl = dict(advantage_estimator="gae", value_loss_coef=0.5)
    backend = train(kit, policy, rl=rl)
    assert policy.value_head.bias.abs().item() > 1e-3
    assert "value_head.weight" not in received(backend.weight_source(torch.float32))
    assert "value_head.weight" in received(backend.weight_source(torch.float32, with_value_head=True))


def test_a_training_state_holds_adapter_and_optimizer_only_and_resumes_bit_by_bit(kit, tmp_path):
    policy = adapted(kit)
    CheckpointStore(tmp_path, Ranks()).save(TrainerState(step=2), train(kit, policy))
    saved = read_tensors(tmp_path / "2" / STATE)
    assert saved and all(".lora_" in name for name in saved)
    again = adapted(kit)
    backend = PlainBackend(again, kit.config(), Ranks())
    assert CheckpointStore(tmp_path, Ranks()).restore(backend).step == 2
    settings = kit.config()
    for target, before in ((again, backend), (policy, None)):
        resumed = before or PlainBackend(policy, settings, Ranks())
        if before is None:
            resumed.load(tmp_path / "2")
        StepRunner(resumed, settings, Ranks()).run(kit.batch(kit.samples(8, seed=3), step=3))
        assert target is resumed.policy
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_an_export_is_the_merged_model_with_the_adapter_beside_it(kit, tmp_path, bias):
    base = tmp_path / "base"
    kit.model().save_pretrained(base)
    policy = adapted(kit, bias=bias)
    backend = train(kit, policy)
    exporter = ModelExporter(tmp_path / "out", str(kit.tokenizer(tmp_path / "tokenizer")), Ranks())
    folder = exporter.export(2, policy, backend.weight_source(torch.float32, with_value_head=True))
    expected = logits(policy.language_model)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["r"] == 4
    with_adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder / "adapter"
    )
    torch.testing.assert_close(logits(with_adapter), expected, atol=1e-5, rtol=0)


def test_frozen_weights_are_kept_in_the_compute_dtype(kit):
    policy = adapted(kit, dtype=torch.bfloat16)
    wide = kit.policy(compute_dtype=torch.bfloat16)
    layer = policy.language_model.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype == torch.bfloat16 and layer.lora_A["default"].weight.dtype == torch.float32
    assert policy.language_model.model.embed_tokens.weight.dtype == torch.float32
    assert forward_difference(policy) == forward_difference(wide)
    backend = train(kit, policy)
    assert {t.dtype for t in received(backend.weight_source(torch.bfloat16)).values()} == {torch.bfloat16}


def test_a_frozen_model_is_in_16_bits_before_it_is_tried_and_computes_in_fp32_meanwhile(kit, tmp_path, monkeypatch):
    """So there is never room needed for all of it in fp32."""
    kit.model().save_pretrained(tmp_path / "model")
    tried = []

    def find_fault(policy, *args):
        layer, exact = policy.language_model.model.layers[0], kit.policy()
        tried.append((layer.mlp.up_proj.weight.dtype, layer.input_layernorm.weight.dtype))
        for parameter in exact.language_model.parameters():
            parameter.data = parameter.data.bfloat16().float() if parameter.ndim > 1 else parameter.data
        embedding = exact.language_model.model.embed_tokens.weight
        embedding.data = policy.language_model.model.embed_tokens.weight.data
        batch = token_batch([[3, 5, 7, 9, 11], [2, 4, 8]], torch.device("cpu"))
        policy.compute_dtype = torch.float32
        found, expected = (each(batch, each.layout_of(batch)).logprobs for each in (policy, exact))
        policy.compute_dtype = torch.bfloat16
        assert torch.equal(found, expected)

    monkeypatch.setattr(loading, "find_fault", find_fault)
    config = RunConfig(
        output_dir=str(tmp_path),
        model_path=str(tmp_path / "model"),
        finetune=dict(lora=dict(enabled=True), dtype="bf16"),
    )
    policy = load_policy(config, torch.device("cpu"))
    assert tried == [(torch.bfloat16, torch.float32)]
    up_proj = policy.language_model.model.layers[0].mlp.up_proj
    assert (up_proj.base_layer.weight.dtype, up_proj.lora_A["default"].weight.dtype) == tried[0]
    assert torch.equal(up_proj.base_layer.weight, kit.model().model.layers[0].mlp.up_proj.weight.bfloat16())


def test_layers_that_cannot_have_one_are_refused(kit):
    for names in (["lm_head"], ["embed_tokens"], ["nowhere"]):
        with pytest.raises(ConfigError, match=r"finetune.lora.target_modules: .*linear layers inside the decoder"):
            adapted(kit, target_modules=names)


def test_the_configuration_turns_adapters_on(kit, tmp_path):
    folder = tmp_path / "model"
    kit.model().save_pretrained(folder)
    config = RunConfig(
        output_dir=str(tmp_path),
        model_path=str(folder),
        finetune=dict(lora=dict(enabled=True)),
    )
    policy = load_policy(config, torch.device("cpu"))
    # Seven linear layers in each of the two decoder layers, two matrices each.
    assert sum(p.requires_grad for p in policy.parameters()) == 7 * 2 * 2
    train(kit, policy, steps=1)
    assert policy.adapter_config.base_model_name_or_path == str(folder)


def test_the_adapter_alone_by_hand(kit):
    """Names as in the checkpoint; alpha / r = 2.5 is in B; nothing else is sent."""
    policy = adapted(kit, target_modules=["q_proj"], with_values=True, sync="adapter")
    layer = policy.language_model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    backend = PlainBackend(policy, kit.config(), Ranks())
    source = backend.adapter_source(torch.float32)
    sent = received(source)
    layers = range(policy.language_model.config.num_hidden_layers)
    assert list(sent) == [f"model.layers.{n}.self_attn.q_proj.lora_{part}.weight" for n in layers for part in "AB"]
    assert [(meta.name, meta.shape) for meta in source.metadata()] == [(n, tuple(t.shape)) for n, t in sent.items()]
    assert torch.equal(sent["model.layers.0.self_attn.q_proj.lora_A.weight"], layer.lora_A["default"].weight)
    assert (sent["model.layers.0.self_attn.q_proj.lora_B.weight"] == 1.25).all()
    assert {tensor.dtype for tensor in received(backend.adapter_source(torch.bfloat16)).values()} == {torch.bfloat16}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_cannot_go_with_an_adapter_alone(kit, bias):
    with pytest.raises(ConfigError, match=f"finetune.lora.bias: got '{bias}'.*finetune.lora.sync=merged"):
        adapted(kit, bias=bias, sync="adapter")


def saved_adapter(kit, folder, **settings):
    """An adapter with random values, written by peft; its model merged by peft."""
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "up_proj"], **settings})
    model = peft.get_peft_model(kit.model(), config)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or (parameter.requires_grad and "bias" in name):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model.merge_and_unload()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": "lora_only"},
        {"use_rslora": True, "rank_pattern": {"up_proj": 5}, "alpha_pattern": {"q_proj": 2}},
        {"target_modules": r".*\.1\..*(q|down)_proj", "lora_dropout": 0.5},
    ],
)
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_training_starts_from_an_adapter_of_peft_and_ends_with_one(kit, tmp_path, settings, sync):
    merged = saved_adapter(kit, tmp_path / "start", **settings)
    bias = settings.get("bias", "none")
    if sync == "adapter" and bias != "none":
        return
    policy = kit.policy()
    add_adapters(policy, LoraConfig(enabled=True, bias=bias, sync=sync, adapter_path=str(tmp_path / "start")), "base")
    torch.testing.assert_close(logits(policy.language_model), logits(merged), atol=1e-5, rtol=0)
    backend = PlainBackend(policy, kit.config(), Ranks())
    expected = dict(merged.named_parameters())
    for name, tensor in received(backend.weight_source(torch.float32)).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0, msg=name)
    if sync == "adapter":
        sent, base = received(backend.adapter_source(torch.float32)), dict(kit.model().named_parameters())
        for layer in {name.rpartition(".lora_")[0] for name in sent}:
            added = sent[f"{layer}.lora_B.weight"] @ sent[f"{layer}.lora_A.weight"]
            difference = expected[f"{layer}.weight"] - base[f"{layer}.weight"]
            torch.testing.assert_close(added, difference, atol=1e-6, rtol=0, msg=layer)
    train(kit, policy, steps=1)
    exporter = ModelExporter(tmp_path / "out", str(kit.tokenizer(tmp_path / "tokenizer")), Ranks())
    folder = exporter.export(1, policy, backend.export_source())
    again = PeftModel.from_pretrained(kit.model(), folder / "adapter")
    torch.testing.assert_close(logits(again), logits(policy.language_model), atol=1e-5, rtol=0)
    assert (logits(again) - logits(merged)).abs().max() > 1e-3


def test_an_adapter_of_another_model_is_refused(kit, tmp_path):
    saved_adapter(kit, tmp_path / "start")
    tensors = read_tensors(tmp_path / "start")
    name = next(iter(tensors))

    def refused():
        with pytest.raises(ConfigError) as caught:
            add_adapters(kit.policy(), LoraConfig(enabled=True, adapter_path=str(tmp_path / "start")), "base")
        return caught.value

    for changed in ({**tensors, name: tensors[name][:, :-1]}, {n: t for n, t in tensors.items() if n != name}):
        write_tensors(tmp_path / "start" / "adapter_model.safetensors", changed)
        assert refused().key == "finetune.lora.adapter_path" and name in refused().expected
    (tmp_path / "start" / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert refused().key == "finetune.lora.adapter_path"


def test_the_command_that_merges(kit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = logits(saved_adapter(kit, tmp_path / "start"))
    kit.tokenizer(tmp_path / "base")
    kit.model().save_pretrained(tmp_path / "base")
    *_, code = shlex.split(merge_command("base", "start"))
    exec(code, {})
    merged = AutoModelForCausalLM.from_pretrained("merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained("merged").vocab_size
