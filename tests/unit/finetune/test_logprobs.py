"""Chunked head against PyTorch's own path: values, gradients, skipped rows, memory."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from fakes.head_case import EXTREME, extreme
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.finetune.policy import compiled_on_gpus, logprobs_from_logits, token_logprobs


def plain_token_logprobs(hidden, weight, targets, temperature=1.0, with_entropy=False, bias=None, fp32_head=True):
    """The same with all logits in memory and PyTorch's own backward."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = hidden.to(wide) @ weight.to(wide).T if fp32_head else (hidden @ weight.T).to(wide)
    logits = logits if bias is None else logits + bias.to(wide)
    return logprobs_from_logits(logits, targets, temperature, with_entropy)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_full_logits_never_exist(with_entropy):
    hidden, weight, bias, targets = head(rows=64, dim=4, vocab=100)
    with LargestTensor() as chunked:
        logprobs, _ = token_logprobs(hidden, weight, targets, 0.7, 8, with_entropy, bias)
        logprobs.sum().backward()
    assert chunked.numel == 8 * 100
    with LargestTensor() as plain:
        plain_token_logprobs(hidden, weight, targets)[0].sum().backward()
    assert plain.numel == 64 * 100


def head(rows=7, dim=5, vocab=11, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=g, dtype=dtype).requires_grad_()
    bias = torch.randn(vocab, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=g)
    targets[::3] = -100
    return hidden, weight, bias, targets


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.floats(0.3, 3.0), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_equals_the_plain_path(chunk, temperature, with_entropy, with_bias, seed):
    hidden, weight, bias, targets = head(seed=seed)
    b = bias if with_bias else None
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    fused = token_logprobs(hidden, weight, targets, temperature, chunk, with_entropy, b)
    plain = plain_token_logprobs(hidden, weight, targets, temperature, with_entropy, b)

    def objective(out):
        steep = torch.linspace(-2, 2, targets.numel(), dtype=torch.float64)
        return (out[0] * steep).sum() + ((out[1] * steep.square()).sum() if with_entropy else 0)

    for ours, theirs in zip(fused, plain, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(objective(fused), inputs), torch.autograd.grad(objective(plain), inputs)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_numbers_by_hand():
    # Logits (0, ln 3) at temperature 1: p = (1/4, 3/4). At temperature 2: (1, sqrt 3) / (1 + sqrt 3).
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]), with_entropy=True)
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    warm, _ = token_logprobs(hidden, weight, torch.tensor([0]), temperature=2.0)
    assert warm.item() == pytest.approx(math.log(1 / (1 + math.sqrt(3))))


@pytest.mark.parametrize(("logits", "target", "logprob", "entropy", "slope"), EXTREME)
def test_certain_and_impossible_tokens(logits, target, logprob, entropy, slope):
    found = extreme(logits, target)
    assert [*found] == [pytest.approx(logprob), pytest.approx(entropy), pytest.approx(slope)]


def test_tokens_that_are_not_numbers():
    assert all(math.isnan(value) for value in extreme([math.nan, 0.0, 0.0], 1)[:2])


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_what_cannot_be_compiled_is_computed_without(monkeypatch, caplog):
    attempts = []

    def broken(function, **_):
        def call(*_):
            attempts.append(function)
            raise torch._dynamo.exc.InternalTorchDynamoError("no C compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = compiled_on_gpus(lambda logits, factor: logits * factor)
    for _ in range(2):
        assert double(torch.ones(1, 2).as_subclass(OnGPU), 2).tolist() == [[2, 2]]
    assert len(attempts) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_more_graphs_than_torch_allows_are_done_without(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(OnGPU, "__torch_function__", torch._C._disabled_torch_function_impl)
    add = compiled_on_gpus(lambda logits, word: logits + len(word))
    for length in range(2 * torch._dynamo.config.recompile_limit):
        assert add(torch.zeros(1, 2).as_subclass(OnGPU), "a" * length).tolist() == [[length, length]]
    assert [record.levelname for record in caplog.records if record.name == compiled_on_gpus.__module__] == ["WARNING"]


def test_other_errors_of_compiled_functions_are_raised(monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "compile", lambda function, **_: exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        compiled_on_gpus(lambda logits: logits)(torch.ones(1, 2).as_subclass(OnGPU))


def test_rows_without_target_stay_connected_and_give_zero():
    hidden, weight, _, targets = head()
    logprobs, _ = token_logprobs(hidden, weight, torch.full_like(targets, -100))
    assert logprobs.requires_grad and not logprobs.any()
    logprobs.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_skipped_rows_may_be_nan():
    hidden, weight, _, targets = head()
    with torch.no_grad():
        hidden[::3] = float("nan")
    token_logprobs(hidden, weight, targets, with_entropy=True)[0].sum().backward()
    assert torch.isfinite(weight.grad).all() and not hidden.grad[::3].any()


def test_bf16_gradients_are_as_exact_as_those_of_a_plain_bf16_head_and_log_probs_far_more():
    """Relative errors against fp64. The chunked path rounds its slopes to bf16 once, as a plain bf16 head does."""
    g = torch.Generator().manual_seed(0)
    tokens, size, vocabulary = 128, 128, 4096
    hidden = torch.randn(tokens, size, generator=g).bfloat16()
    weight = (torch.randn(vocabulary, size, generator=g) / size**0.5).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), generator=g)

    def run(path, dtype, **options):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        logprobs, entropy = path(*leaves, targets, temperature=0.9, with_entropy=True, **options)
        (logprobs.mean() + 0.01 * entropy.mean()).backward()
        return [tensor.detach().double() for tensor in (logprobs, leaves[0].grad, leaves[1].grad)]

    exact = run(plain_token_logprobs, torch.float64)

    def errors(path, **options):
        found = run(path, torch.bfloat16, **options)
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    chunked, plain = errors(token_logprobs, chunk_tokens=50), errors(plain_token_logprobs, fp32_head=False)
    assert chunked[0] < 1e-3 * plain[0]
    assert chunked[1] < 1.02 * plain[1] and chunked[2] < 1.02 * plain[2]
