"""The trainer computes with the weights that servers have, and updates fp32 masters behind them."""

from __future__ import annotations

import pytest
import torch

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.model import load_policy, load_reference
from pipelinerl.finetune.model_check import branching_tokens, token_batch
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.served_weights import ServedValues, parameters_to_round
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import STATE, read_tensors
from pipelinerl.weights.buffers import packed_buffers

CPU = torch.device("cpu")
BF16 = torch.bfloat16
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def is_rounded(tensor: torch.Tensor, dtype: torch.dtype = BF16) -> bool:
    return torch.equal(tensor, tensor.to(dtype).float())


def names_of(model, chosen) -> set[str]:
    ids = {id(parameter) for parameter in chosen}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def train(backend, kit, steps: int, first: int = 1) -> None:
    config = kit.config(learning_rate=1e-3, lr_scheduler_type="constant")
    runner = StepRunner(backend, config, Ranks())
    for step in range(first, first + steps):
        runner.run(kit.batch(kit.samples(8, seed=step), step=step))


def received(backend, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.clone() for bucket in backend.weight_source(dtype).buckets() for name, value in bucket}


@torch.no_grad()
def logprobs(policy) -> torch.Tensor:
    batch = token_batch([IDS], CPU)
    return policy(batch, policy.layout_of(batch), 1.0).logprobs


def test_updates_smaller_than_a_bf16_step_add_up() -> None:
    # In bf16 numbers from 1 on are 2**-7 apart, those below 1 2**-8.
    parameter = torch.nn.Parameter(torch.tensor([1.0, 1.003, -0.7]))
    served = ServedValues([parameter], BF16)
    assert parameter.tolist() == [1.0, 1.0, -179 / 256]
    for _ in range(8):
        with served.masters():
            parameter.data.add_(0.001)
    # 1.008 is above 1 + 2**-7 / 2 and below 1 + 3 * 2**-7 / 2; 1.011 too; -0.692 is closest to -177 / 256.
    assert parameter.tolist() == [1 + 2**-7, 1 + 2**-7, -177 / 256]
    expected = torch.tensor([1.0, 1.003, -0.7])
    for _ in range(8):
        expected += 0.001
    assert torch.equal(served.value_of("any", parameter), expected)
    assert torch.equal(parameter, expected.to(BF16).float())


def test_a_frozen_parameter_is_rounded_for_good_and_another_one_left_alone() -> None:
    frozen = torch.nn.Parameter(torch.tensor([1.003]), requires_grad=False)
    other = torch.nn.Parameter(torch.tensor([1.003]))
    served = ServedValues([frozen], BF16)
    with served.masters():
        assert frozen.item() == 1.0
    assert served.value_of("any", other) is other


@pytest.mark.parametrize("tied", [False, True])
def test_what_bf16_products_leave_is_vectors_and_embeddings(kit, tied: bool) -> None:
    model = kit.model("qwen2", tied=tied)
    chosen = names_of(model, parameters_to_round(model, BF16, BF16, is_merged=False))
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    assert len(vectors) == 11 and chosen == vectors | {"model.embed_tokens.weight"}
    everything = parameters_to_round(model, torch.float32, torch.float16, is_merged=False)
    assert len(everything) == len(list(model.parameters()))
    assert parameters_to_round(model, torch.float32, torch.float32, is_merged=False) == []


@pytest.mark.parametrize("computed", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_the_sent_weights_has_the_same_logprobs(kit, computed: torch.dtype, tied: bool) -> None:
    policy = kit.policy(tied=tied, compute_dtype=computed, served_dtype=BF16)
    backend = PlainBackend(policy, kit.config(), Ranks())
    other = kit.policy(tied=tied, compute_dtype=computed)
    for step in range(1, 4):
        train(backend, kit, 1, first=step)
        other.language_model.load_state_dict(received(backend, BF16), strict=False)
        assert torch.equal(logprobs(policy), logprobs(other)), step
    # Without rounding they differ, so the test can tell.
    other.language_model.load_state_dict(received(backend, torch.float32), strict=False)
    assert not torch.equal(logprobs(policy), logprobs(other))


def test_master_weights_are_saved_and_training_goes_on_exactly(kit, tmp_path) -> None:
    def backend_of():
        return PlainBackend(kit.policy(served_dtype=BF16), kit.config(), Ranks())

    whole, first, second = backend_of(), backend_of(), backend_of()
    train(whole, kit, 4)
    train(first, kit, 2)
    first.save(tmp_path)
    saved = read_tensors(tmp_path / STATE)
    name = "language_model.model.norm.weight"
    assert not is_rounded(saved[f"model/{name}"])
    # Saving leaves the parameters as they were.
    assert is_rounded(dict(first.policy.named_parameters())[name])
    second.load(tmp_path)
    assert is_rounded(dict(second.policy.named_parameters())[name])
    train(second, kit, 2, first=3)
    for dtype in (torch.float32, BF16):
        expected, found = received(whole, dtype), received(second, dtype)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected), dtype


def test_the_masters_move_as_those_of_an_unrounded_trainer(kit) -> None:
    start = kit.policy().language_model.state_dict()
    backends = [PlainBackend(kit.policy(**options), kit.config(), Ranks()) for options in ({}, {"served_dtype": BF16})]
    for backend in backends:
        train(backend, kit, 3)
    exact, rounded = (received(backend, torch.float32) for backend in backends)
    moved = sum(float((value - start[name]).abs().sum()) for name, value in exact.items())
    apart = sum(float((value - rounded[name]).abs().sum()) for name, value in exact.items())
    assert 0 < apart < 0.1 * moved


def test_with_adapters_only_the_frozen_vectors_and_embeddings_are_rounded(kit, tmp_path) -> None:
    policy = kit.policy(compute_dtype=BF16, served_dtype=BF16)
    add_adapters(policy, LoraConfig(enabled=True, r=2), "base")
    names = names_of(policy, parameters_to_round(policy.language_model, BF16, BF16, is_merged=True))
    assert names and all("norm" in name or "embed" in name or "bias" in name for name in names)
    in_fp32 = names_of(policy, parameters_to_round(policy.language_model, torch.float32, BF16, is_merged=True))
    assert not any("lora" in name or "proj.base_layer.weight" in name for name in in_fp32)
    PlainBackend(policy, kit.config(), Ranks())
    parameters = dict(policy.named_parameters())
    assert all(is_rounded(parameters[name]) for name in names)


def test_where_servers_get_the_adapter_alone_the_trainer_computes_with_their_base_and_adapter(kit) -> None:
    """fp32 products beside servers in bf16: every parameter has a value of bf16, and A and B have masters."""
    policy = kit.policy(compute_dtype=torch.float32, served_dtype=BF16)
    add_adapters(policy, LoraConfig(enabled=True, r=2, alpha=8, sync="adapter"), "base")
    backend = PlainBackend(policy, kit.config(), Ranks())
    train(backend, kit, 2)
    parameters = dict(policy.language_model.named_parameters())
    assert all(is_rounded(parameter) for parameter in parameters.values())
    sent = {name: t.clone() for bucket in backend.adapter_source(BF16).buckets() for name, t in bucket}
    masters = {name: t.clone() for bucket in backend.adapter_source(torch.float32).buckets() for name, t in bucket}
    assert any(not is_rounded(tensor) for tensor in masters.values())
    for name, tensor in sent.items():
        own = parameters[name.replace(".weight", ".default.weight")]
        # alpha / r = 4 is a power of two: B times it is exact.
        assert torch.equal(tensor.float(), own * (4 if ".lora_B." in name else 1)), name


def test_a_weight_beyond_float16_is_refused_by_name_and_its_master_kept(kit, tmp_path) -> None:
    policy = kit.policy(served_dtype=torch.float16)
    with torch.no_grad():
        policy.language_model.model.norm.weight[0] = 70000.0
    backend = PlainBackend(policy, kit.config(), Ranks())
    source = backend.weight_source(torch.float16)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight has values that overflow"):
        list(packed_buffers(source, source.metadata(), 2**20, 0, ["actor_llm_0"]))
    # Nothing became infinite or NaN behind it.
    assert torch.isfinite(logprobs(policy)).all()
    backend.save(tmp_path)
    assert read_tensors(tmp_path / STATE)["model/language_model.model.norm.weight"][0] == 70000.0
    assert received(backend, torch.float32)["model.norm.weight"][0] == 70000.0


def test_what_waits_in_host_memory_is_not_fetched_to_send_the_weights(kit) -> None:
    backend = PlainBackend(kit.policy(served_dtype=BF16), kit.config(), Ranks())
    train(backend, kit, 1)
    sent, masters = received(backend, BF16), received(backend, torch.float32)
    # On `meta` there is nothing to fetch.
    backend.move_optimizer(torch.device("meta"))
    away = received(backend, BF16)
    assert all(torch.equal(sent[name], away[name]) and torch.equal(masters[name].to(BF16), away[name]) for name in sent)


@pytest.mark.parametrize(
    ("dtype", "server", "expected"),
    [("bf16", None, BF16), ("fp32", "bfloat16", BF16), ("fp32", "float16", torch.float16), ("fp32", "float32", None)],
)
def test_a_loaded_policy_and_its_reference_know_the_servers_dtype(kit, tmp_path, dtype, server, expected) -> None:
    kit.model().save_pretrained(tmp_path / "model")
    kit.tokenizer(tmp_path / "model")
    config = RunConfig(
        output_dir=str(tmp_path),
        model_path=str(tmp_path / "model"),
        vllm_config={"vllm_kwargs": {"dtype": server} if server else {}},
        finetune={"dtype": dtype, "gradient_checkpointing": False, "rl": {"kl_coef": 0.1, "reference": "local"}},
    )
    policy = load_policy(config, CPU)
    assert policy.served_dtype == (expected or torch.float32)
    PlainBackend(policy, config.finetune, Ranks())
    reference = load_reference(config, policy, CPU, has_servers=False)
    assert reference is not None
    batch = token_batch([*branching_tokens(policy), IDS], CPU)
    layout = policy.layout_of(batch)
    assert layout is not None and layout.shared is not None
    with torch.no_grad():
        ours = policy(batch, layout).logprobs
    # The reference is the policy at the start, also where rounding changed both.
    assert torch.equal(ours, reference.logprobs([batch])[0])
    weight = policy.language_model.model.norm.weight
    assert expected is None or is_rounded(weight, expected)
