"""The one-kernel attention: its layout, its window and its heads, with a plain kernel in place of the GPU's."""

import pytest
import torch
from fakes.varlen_kernel import plain_varlen_attn, plain_without_grouped_heads

from pipelinerl.finetune import attention as varlen
from pipelinerl.finetune.attention import candidate_implementations, segment_layout, segmented_attention
from pipelinerl.finetune.model_check import forward_difference, packing_difference, token_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = [plain_varlen_attn, plain_without_grouped_heads]


def test_layout_by_hand():
    layout = varlen.varlen_layout([2, 1, 5])
    assert layout.boundaries.tolist() == [0, 2, 3, 8] and layout.boundaries.dtype == torch.int32
    assert layout.longest == 5
    assert isinstance(layout.to(CPU), varlen.VarlenLayout)


def test_a_window_of_two_by_hand(monkeypatch):
    """Equal scores: the output is the mean of the values that a position sees, its own and the one before."""
    monkeypatch.setattr(varlen, "_kernel", lambda: plain_varlen_attn)
    value = torch.tensor([[1.0], [3.0], [5.0], [10.0], [20.0]]).view(1, 1, 5, 1)
    zeros = torch.zeros(1, 1, 5, 1)
    layout = varlen.varlen_layout([3, 2])
    found = varlen.varlen_attention(zeros, zeros, value, layout, sliding_window=2)
    assert found.flatten().tolist() == [1, 2, 4, 10, 15]
    found = varlen.varlen_attention(zeros, zeros, value, layout)
    assert found.flatten().tolist() == [1, 2, 3, 10, 15]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_computes_what_the_segmented_attention_does(monkeypatch, kernel, window, scaling):
    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    generator = torch.Generator().manual_seed(3)
    lengths = [4, 7, 1, 9]
    query, key, value = (torch.randn(1, heads, 21, 8, generator=generator) for heads in (6, 2, 2))
    module = torch.nn.Module()
    expected, _ = segmented_attention(
        module, query, key, value, None, scaling, segment_layout=segment_layout(lengths), sliding_window=window
    )
    found = varlen.varlen_attention(query, key, value, varlen.varlen_layout(lengths), scaling, window)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_m3_packed_equals_alone(kit, monkeypatch, family, kernel):
    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    policy = kit.policy(family, attention=varlen.VARLEN_ATTENTION)
    assert isinstance(policy.layout_of(token_batch([[5, 6, 7], [8, 9, 5, 6]], CPU)), varlen.VarlenLayout)
    assert forward_difference(policy) < 1e-5
    assert packing_difference(policy) < 1e-5


def test_a_leak_is_found(kit, monkeypatch):
    def leaky(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        whole = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        length = query.shape[0]
        return plain_without_grouped_heads(
            query, key, value, whole, whole, length, length, scale=scale, window_size=window_size
        )

    monkeypatch.setattr(varlen, "_kernel", lambda: leaky)
    assert packing_difference(kit.policy(attention=varlen.VARLEN_ATTENTION)) > 1e-3


def test_it_is_tried_where_its_kernel_is(monkeypatch):
    def tried(dtype, device):
        return varlen.VARLEN_ATTENTION in candidate_implementations("auto", device, dtype)

    monkeypatch.setattr(varlen, "_kernel", lambda: plain_without_grouped_heads)
    assert tried(torch.bfloat16, CUDA) and tried(torch.float16, CUDA)
    assert not tried(torch.float32, CUDA) and not tried(torch.bfloat16, CPU)
    assert candidate_implementations("sdpa", CUDA, torch.bfloat16) == ["sdpa"]
    # The first release had neither a window nor a scale.
    monkeypatch.setattr(varlen, "_kernel", lambda: lambda query, key, value, is_causal: value)
    assert not tried(torch.bfloat16, CUDA)
