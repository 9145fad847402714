"""Equal prefixes computed once: which tokens are kept, the same log-probs and gradients, and models that cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fakes.families import FAMILIES, random_model
from fakes.finetune_kit import Kit
from fakes.varlen_kernel import plain_varlen_attn

from pipelinerl.finetune import attention
from pipelinerl.finetune.attention import repeated, shared_prefixes
from pipelinerl.finetune.model import find_fault, remove_dropout
from pipelinerl.finetune.model_check import branching_tokens, sample_tokens, sharing_difference, token_batch
from pipelinerl.finetune.policy import PolicyModel

CPU = torch.device("cpu")
SAMPLES = [[5, 6, 7, 8], [9, 9, 9], [5, 6, 7, 4], [5, 6], [9, 9, 9], [6, 5, 7, 8]]


def layout_of(samples: list[list[int]]) -> attention.SharedPrefixes | None:
    return shared_prefixes(torch.tensor([token for sample in samples for token in sample]), list(map(len, samples)))


def test_the_first_of_equal_prefixes_is_kept() -> None:
    """By hand. Wherever a sample is in the row, it shares what others begin with, but for its last token."""
    shared = layout_of(SAMPLES)
    assert shared is not None
    # Sorted, [5, 6] comes first and keeps what the longer ones begin with; the second [9, 9, 9] keeps one token.
    assert shared.kept.tolist() == [3, 4, 5, 6, 9, 10, 11, 12, 15, 16, 17, 18, 19]
    row = torch.tensor([token for sample in SAMPLES for token in sample])
    assert row[shared.kept][shared.source].equal(row)
    first, third, short = (shared.kept[shared.source[start : start + 2]].tolist() for start in (0, 7, 11))
    assert first == third == short == [11, 12]


def test_equal_tokens_after_other_ones_are_not_shared() -> None:
    assert layout_of([[1, 2, 3, 4], [2, 2, 3, 4]]) is None
    assert layout_of([[1, 2, 3, 4]]) is None


@pytest.mark.parametrize("seed", range(20))
def test_kept_tokens_are_the_nodes_of_a_tree(seed: int) -> None:
    """As many as different prefixes, and the last tokens of copies; every position has the source of its own prefix."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (30,), generator=draw).tolist()
    samples = [torch.randint(0, 2, (size,), generator=draw).tolist() for size in sizes]
    shared = layout_of(samples)
    assert shared is not None
    prefixes = [tuple(sample[: place + 1]) for sample in samples for place in range(len(sample))]
    copies = len(samples) - len(set(map(tuple, samples)))
    assert len(shared.kept) == len(set(prefixes)) + copies
    assert [prefixes[index] for index in shared.kept[shared.source].tolist()] == prefixes


def test_gradients_of_repeated_rows_are_added_up_in_fp32() -> None:
    """600 times 1 + 2**-7 in bf16 would stop growing at 256."""
    rows = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    repeated(rows, torch.tensor([0, *[1] * 600])).backward(torch.full((601, 3), 1 + 2**-7, dtype=torch.bfloat16))
    assert rows.grad is not None and rows.grad.dtype == torch.bfloat16
    expected = torch.tensor([1 + 2**-7, 600 * (1 + 2**-7)]).to(torch.bfloat16)
    assert torch.equal(rows.grad[:, 0], expected)


@pytest.mark.parametrize("make", [attention.segment_layout, attention.varlen_layout])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}, {"sliding_window": 2}])
def test_attention_sees_whole_samples(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., attention.Layout], options: dict[str, float]
) -> None:
    monkeypatch.setattr(attention, "_kernel", lambda: plain_varlen_attn)
    lengths, shared = list(map(len, SAMPLES)), layout_of(SAMPLES)
    assert shared is not None
    draw = torch.Generator().manual_seed(3)
    kept = [torch.randn(1, heads, len(shared.kept), 8, generator=draw) for heads in (6, 2, 2)]
    whole = [states[:, :, shared.source] for states in kept]
    module = torch.nn.Module()
    expected, _ = attention.segmented_attention(module, *whole, None, segment_layout=make(lengths), **options)
    found, _ = attention.segmented_attention(module, *kept, None, segment_layout=make(lengths, shared), **options)
    torch.testing.assert_close(found, expected[:, shared.kept])


def gradients(policy: PolicyModel, samples: list[list[int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = token_batch(samples, CPU)
    outputs = policy(*policy.placed(batch, CPU))
    weights = torch.linspace(-1, 2, outputs.logprobs.numel())
    loss = (outputs.logprobs.flatten() * weights).sum()
    if outputs.values is not None:
        loss = loss + (outputs.values.flatten() * weights).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return outputs.logprobs.detach(), found


@pytest.mark.parametrize("kind", ["segments", "varlen", "checkpointing", "values"])
def test_log_probs_and_gradients_are_those_of_samples_apart(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(attention, "_kernel", lambda: plain_varlen_attn)
    chosen = attention.VARLEN_ATTENTION if kind == "varlen" else attention.SEGMENTED_ATTENTION
    policy = kit.policy(attention=chosen, with_values=kind == "values")
    if kind == "checkpointing":
        policy.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.weight)
    samples = branching_tokens(policy)
    expected, exact = gradients(policy, samples)
    policy.shares_prefixes = True
    lengths: list[int] = []
    policy.language_model.base_model.layers[0].register_forward_pre_hook(
        lambda module, inputs: lengths.append(inputs[0].shape[1])
    )
    found, ours = gradients(policy, samples)
    assert lengths[0] < 0.75 * sum(map(len, samples))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert ours.keys() == exact.keys()
    for name, tensor in exact.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5 * max(1, float(tensor.abs().max())), msg=name)


#: Windows, learned positions, experts, sinks.
QUICK = ("gemma3_text", "gpt2", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_that_shares_prefixes_has_the_same_gradients(family: str) -> None:
    attention.register_own_attention()
    model = random_model(family).float()
    remove_dropout(model)
    model.set_attn_implementation(attention.SEGMENTED_ATTENTION)
    policy = PolicyModel(model, shares_prefixes=True)
    if find_fault(policy, packed=True) is not None or not policy.has_linear_head:
        assert family not in QUICK
        return
    assert policy.shares_prefixes
    samples = branching_tokens(policy)
    found, ours = gradients(policy, samples)
    policy.shares_prefixes = False
    expected, exact = gradients(policy, samples)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, tensor in exact.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5 * max(1, float(tensor.abs().max())), msg=name)


def test_it_is_turned_off_where_more_than_attention_mixes_tokens(kit: Kit) -> None:
    """A convolution over the row, as in hybrid models that find the borders of samples by their positions."""
    policy = kit.policy()
    policy.shares_prefixes = True
    assert find_fault(policy, packed=True) is None
    assert policy.shares_prefixes

    def mix(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        starts = positions[0] == 0
        before = torch.where(starts[..., None], 0.0, output.roll(1, 1))
        return output + 0.1 * before

    def note_positions(module: torch.nn.Module, inputs: tuple[()], named: dict[str, torch.Tensor]) -> None:
        own = named.get("position_ids")
        positions[:] = [torch.arange(named["input_ids"].shape[1])[None] if own is None else own]

    positions: list[torch.Tensor] = []
    decoder = policy.language_model.base_model
    decoder.register_forward_pre_hook(note_positions, with_kwargs=True)
    decoder.layers[0].mlp.register_forward_hook(mix)
    assert find_fault(policy, packed=True) is None
    assert not policy.shares_prefixes
    assert sharing_difference(policy) < 1e-5


def test_trial_tokens_branch(kit: Kit) -> None:
    policy = kit.policy()
    samples = branching_tokens(policy)
    assert layout_of(samples) is not None and layout_of(sample_tokens(policy)) is None
    assert max(map(len, samples)) == max(map(len, sample_tokens(policy)))
