"""Attention over packed samples: which implementation to use, and our own two, which isolate samples from each other.

`segmented_attention` is registered with transformers as an attention implementation. A packed row of T tokens goes
through all linear layers unchanged; only for attention, samples of similar length become rows of a block, so that
PyTorch's causal kernel needs no mask and its cost grows with the samples' lengths instead of T squared. `SegmentLayout`
holds the index tensors of one row; it is built once per micro-batch and passed to the layers as `segment_layout`.

`varlen_attention` is PyTorch's flash attention for several sequences in one row, for half precision on GPUs
(`torch.nn.attention.varlen`, 2.11 or later): one kernel per layer instead of about ten.

Samples that begin with the same tokens, such as those of a group, have the same hidden states there, because attention
is causal. With `SharedPrefixes` the layers compute them once, and only attention sees whole samples; `varlen_attention`
needs only their keys and values.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

SEGMENTED_ATTENTION = "pipelinerl_segments"
VARLEN_ATTENTION = "pipelinerl_varlen"
#: Use a layout of the row instead of a mask.
OWN_ATTENTIONS = (SEGMENTED_ATTENTION, VARLEN_ATTENTION)
#: Have no kernel for fp32.
HALF_PRECISION_ONLY = ("flash_attention_2", VARLEN_ATTENTION)
_MAX_PADDING_RATIO = 2


@dataclass(frozen=True)
class SharedPrefixes:
    """Which tokens of a packed row of T tokens are computed, where samples begin with the same ones.

    `kept` int64 `[K]`: their positions in the row. `source` int64 `[T]`: for every position, which of those it equals.
    """

    kept: torch.Tensor
    source: torch.Tensor

    def to(self, device: torch.device) -> SharedPrefixes:
        return SharedPrefixes(self.kept.to(device, non_blocking=True), self.source.to(device, non_blocking=True))

    def reduced(self, row: torch.Tensor) -> torch.Tensor:
        """The kept positions of `row` `[1, T, ...]`: `[1, K, ...]`."""
        return row.index_select(1, self.kept)

    def restored(self, row: torch.Tensor) -> torch.Tensor:
        """All positions of a row of the kept ones `[1, K, ...]`: `[1, T, ...]`."""
        return repeated(row[0], self.source)[None]


def shared_prefixes(row: torch.Tensor, lengths: Sequence[int]) -> SharedPrefixes | None:
    """Equal prefixes of the samples of `row` int64 `[T]`, which have these `lengths`; None if there are none."""
    tokens = row.numpy()
    ends = np.cumsum(lengths)
    samples = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    # In this order no other sample before it has more tokens in common with a sample than its neighbor.
    order = sorted(range(len(samples)), key=lambda sample: samples[sample].astype(">i8").tobytes())
    first = np.arange(len(tokens))
    for before, after in pairwise(order):
        # Of every sample at least the last token is kept: attention needs a query of each.
        most = min(lengths[before], lengths[after] - 1)
        unequal = np.flatnonzero(samples[before][:most] != samples[after][:most])
        common = int(unequal[0]) if len(unequal) else most
        start = ends[after] - lengths[after]
        first[start : start + common] = first[ends[before] - lengths[before] :][:common]
    is_kept = first == np.arange(len(tokens))
    if is_kept.all():
        return None
    return SharedPrefixes(torch.from_numpy(np.flatnonzero(is_kept)), torch.from_numpy((is_kept.cumsum() - 1)[first]))


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros((ctx.num_rows, *gradient.shape[1:]), dtype=wide)
        return total.index_add(0, index, gradient.to(wide)).to(gradient.dtype), None


def repeated(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`rows[index]`, where a row may be taken many times: its gradient is added up in fp32 at least."""
    taken: torch.Tensor = _Repeated.apply(rows, index)  # type: ignore[no-untyped-call]
    return taken


@dataclass(frozen=True)
class SegmentLayout:
    """How one packed row of T tokens becomes blocks of equally long samples, and back.

    `blocks` holds (index `[samples * length]` into the row, samples, length); shorter samples repeat their last token,
    which no real token attends to. `restore` `[T]` indexes the concatenated blocks. With shared prefixes both are about
    the K tokens that are kept.
    """

    blocks: tuple[tuple[torch.Tensor, int, int], ...]
    restore: torch.Tensor
    shared: SharedPrefixes | None = None

    def to(self, device: torch.device) -> SegmentLayout:
        blocks = tuple((index.to(device, non_blocking=True), count, length) for index, count, length in self.blocks)
        return SegmentLayout(blocks, self.restore.to(device, non_blocking=True), _moved(self.shared, device))


def _moved(shared: SharedPrefixes | None, device: torch.device) -> SharedPrefixes | None:
    return None if shared is None else shared.to(device)


def segment_layout(lengths: Sequence[int], shared: SharedPrefixes | None = None) -> SegmentLayout:
    """Layout of a row that holds samples of these `lengths` one after the other.

    Samples are sorted by length and split into blocks so that none is padded to more than twice its length.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    groups: list[list[int]] = []
    for sample in order:
        if groups and lengths[groups[-1][0]] <= _MAX_PADDING_RATIO * lengths[sample]:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    blocks = []
    restore = torch.empty(int(starts[-1]), dtype=torch.int64)
    offset = 0
    for group in groups:
        length = lengths[group[0]]
        sizes = torch.tensor([lengths[sample] for sample in group])[:, None]
        column = torch.arange(length)[None, :]
        index = starts[group][:, None] + torch.minimum(column, sizes - 1)
        slots = offset + torch.arange(len(group) * length).view(len(group), length)
        real = column < sizes
        restore[index[real]] = slots[real]
        index = index.reshape(-1)
        blocks.append((index if shared is None else shared.source[index], len(group), length))
        offset += len(group) * length
    return SegmentLayout(tuple(blocks), restore if shared is None else restore[shared.kept], shared)


@dataclass(frozen=True)
class VarlenLayout:
    """Where the samples of one packed row of T tokens begin.

    `boundaries` int32 `[samples + 1]`: 0, then the end of every sample; `longest` is the longest sample in tokens.
    `query_boundaries` and `longest_query` are the same for the K kept tokens, which are the ends of the samples;
    without shared prefixes, all tokens are kept.
    """

    boundaries: torch.Tensor
    longest: int
    query_boundaries: torch.Tensor
    longest_query: int
    shared: SharedPrefixes | None = None

    def to(self, device: torch.device) -> VarlenLayout:
        return VarlenLayout(
            self.boundaries.to(device, non_blocking=True),
            self.longest,
            self.query_boundaries.to(device, non_blocking=True),
            self.longest_query,
            _moved(self.shared, device),
        )


def varlen_layout(lengths: Sequence[int], shared: SharedPrefixes | None = None) -> VarlenLayout:
    """Layout of a row that holds samples of these `lengths` one after the other."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    kept = ends if shared is None else torch.searchsorted(shared.kept, ends)
    longest, longest_query = (int(each.diff().max()) for each in (ends, kept))
    return VarlenLayout(ends.to(torch.int32), longest, kept.to(torch.int32), longest_query, shared)


Layout = SegmentLayout | VarlenLayout


def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segment_layout: Layout | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a packed row, or within each right-padded row without a layout.

    The type of the layout selects the implementation.

    Args:
        query: `[rows, heads, T, head size]`; `key` and `value` may have fewer heads. With shared prefixes T here is K.
        s_aux: attention sinks `[heads]`: an additional logit without a value in every softmax.

    Returns:
        `[rows, T, heads, head size]` and no attention weights, as transformers expects.

    Raises:
        ValueError: a mask, soft-capped logits, or sinks without a `SegmentLayout`.
    """
    if isinstance(segment_layout, VarlenLayout) and (dropout or s_aux is not None):
        raise ValueError(f"{VARLEN_ATTENTION}: got dropout={dropout} or attention sinks, expected neither")
    special = [name for name in ("softcap", "position_bias") if unused.get(name) is not None]
    if attention_mask is not None or special:
        raise ValueError(f"our attention: got {special or 'a mask'}, expected plain causal attention")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if s_aux is not None:
            return attend_with_sinks(q, k, v, s_aux, scaling, dropout, sliding_window)
        length = q.shape[2]
        band = None
        if sliding_window is not None and length > sliding_window:
            position = torch.arange(length, device=q.device)
            distance = position[:, None] - position[None, :]
            band = (distance >= 0) & (distance < sliding_window)
        return F.scaled_dot_product_attention(
            q, k, v, band, dropout, is_causal=band is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
        )

    if segment_layout is None:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    if isinstance(segment_layout, VarlenLayout):
        return varlen_attention(query, key, value, segment_layout, scaling, sliding_window), None
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    outputs = []
    for index, count, length in segment_layout.blocks:
        block = [repeated(row, index).view(count, length, *row.shape[1:]).transpose(1, 2) for row in rows]
        outputs.append(attend(*block).transpose(1, 2).reshape(count * length, *rows[0].shape[1:]))
    return torch.cat(outputs).index_select(0, segment_layout.restore)[None], None


def attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of `[rows, heads, T, head size]` with an additional logit per head, by PyTorch's kernel.

    The sink is a key before all others, with value 0. Heads get 8 more components (kernels require multiples of 8): in
    the first of them each query has its head's sink, the key of the sink has 1, and other keys have 0.
    """
    size, scale = q.shape[-1], q.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (F.pad(states, (0, 8, 1, 0)) for states in (q, k, v))
    sink_key = F.one_hot(torch.tensor(size, device=k.device), size + 8).to(k.dtype)
    k = torch.cat([sink_key.expand(*k.shape[:2], 1, -1), k[:, :, 1:]], dim=2)
    sink_query = (sinks / scale).to(q.dtype)[None, :, None, None].expand(*q.shape[:3], 1)
    q = torch.cat([q[..., :size], sink_query, q[..., size + 1 :]], dim=-1)
    band = None
    if sliding_window is not None and q.shape[2] - 1 > sliding_window:
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position[None, :]
        band = (distance >= 0) & ((distance < sliding_window) | (position == 0))
    attended = F.scaled_dot_product_attention(
        q, k, v, band, dropout, is_causal=band is None, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return attended[:, :, 1:, :size]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: VarlenLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each sample of a packed row.

    Args:
        query: `[1, heads, T, head size]`; `key` and `value` may have fewer heads. `value` has the dtype of the result
            (bf16 or fp16); the others may be wider, as after rotary embeddings under autocast. With shared prefixes T
            here is K.
        sliding_window: tokens that a position sees, itself included; None: all before it.

    Returns:
        `[1, T, heads, head size]`.
    """
    kernel = _kernel()
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    if layout.shared is not None:
        k, v = (repeated(states, layout.shared.source) for states in (k, v))
    # Releases without this option do not need it.
    options: dict[str, object] = {"enable_gqa": True} if _takes_grouped_heads() else {}
    # (left, right): tokens before and after a position that it sees; -1 is all of them.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    # The queries of a sample are those of its last tokens, as the kernel takes fewer queries than keys.
    boundaries, longest = (layout.query_boundaries, layout.boundaries), (layout.longest_query, layout.longest)
    attended: torch.Tensor = kernel(q, k, v, *boundaries, *longest, scale=scaling, window_size=window, **options)
    return attended[None]


def can_use_varlen(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch has the kernel for products of `dtype` on `device`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    # The first releases of the module have neither windows nor a scale.
    return {"scale", "window_size"} <= _parameters(_kernel())


def _kernel() -> Callable[..., Any]:
    return varlen_attn


@torch.compiler.assume_constant_result
def _takes_grouped_heads() -> bool:
    return "enable_gqa" in _parameters(_kernel())


@cache
def _parameters(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


def register_own_attention() -> None:
    """Make our attentions known to transformers (safe to call twice)."""
    for name in OWN_ATTENTIONS:
        AttentionInterface.register(name, segmented_attention)


def candidate_implementations(wanted: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[str]:
    """Attention implementations to try for products in `dtype`, best first; a wanted one is the only candidate."""
    if wanted != "auto":
        return [SEGMENTED_ATTENTION if wanted == "segments" else wanted]
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    varlen = can_use_varlen(dtype, device)
    return [
        *(["flash_attention_2"] if flash else []),
        *([VARLEN_ATTENTION] if varlen else []),
        SEGMENTED_ATTENTION,
        "sdpa",
        "eager",
    ]
