"""A plain module that loads its weights as a server's model does: merged, sharded, padded, tied, skipped, cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from pipelinerl.inference.planned_load import Mode, PlannedLoader
from pipelinerl.weights.layout import UpdateLayout, plan_layout
from pipelinerl.weights.packing import TensorMeta, pack

Loader = Callable[[torch.Tensor, torch.Tensor], object]
Weights = Iterable[tuple[str, torch.Tensor]]

HIDDEN, HEADS, VOCABULARY, PADDED = 4, 8, 5, 8
#: Of the two halves into which `o.weight` is split by columns.
COLUMNS = 4


class StackedModel(torch.nn.Module):
    """q, k, v in one matrix, gate and up in another, an embedding with padding rows that is the head too.

    Args:
        dtype: of all parameters but the norm's, which is fp32.
        rank: which half of `o.weight` (by columns) this one of two has.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rank: int = 0) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, HEADS + 2 + 2, dtype=dtype)
        self.gate_up = torch.nn.Linear(HIDDEN, 6, bias=False, dtype=dtype)
        self.o = torch.nn.Linear(COLUMNS, HIDDEN, bias=False, dtype=dtype)
        self.embed = torch.nn.Embedding(PADDED, HIDDEN, dtype=dtype)
        self.head = torch.nn.Linear(HIDDEN, PADDED, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False, dtype=torch.float32)
        self.register_buffer("scale", torch.ones(1))
        self.rank = rank
        #: Takes the place of plain copying where a test wants it, by name of the tensor.
        self.loaders: dict[str, Loader] = {}
        self.loads = 0

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        self.loads += 1
        for name, tensor in weights:
            if (target := self.target(name)) is None:
                continue
            if name == "o.weight":
                tensor = tensor.narrow(1, self.rank * COLUMNS, COLUMNS)
            if name == "embed.weight":
                target[VOCABULARY:].data.fill_(0)
                target = target[:VOCABULARY].data
            self.loaders.get(name, torch.Tensor.copy_)(target, tensor)

    def target(self, name: str) -> torch.Tensor | None:
        layer, kind = name.rsplit(".", 1)
        row, rows = {"q": (0, HEADS), "k": (HEADS, 2), "v": (HEADS + 2, 2), "gate": (0, 3), "up": (3, 3)}.get(
            layer, (0, 0)
        )
        if layer in ("q", "k", "v"):
            return getattr(self.qkv, kind).data.narrow(0, row, rows)
        if layer in ("gate", "up"):
            return self.gate_up.weight.data[row : row + rows]
        # The head is the embedding, and angles are computed.
        return None if layer in ("head", "angles") else getattr(self, layer).weight.data


SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "q.weight": (HEADS, HIDDEN),
    "q.bias": (HEADS,),
    "k.weight": (2, HIDDEN),
    "k.bias": (2,),
    "v.weight": (2, HIDDEN),
    "v.bias": (2,),
    "o.weight": (HIDDEN, 2 * COLUMNS),
    "gate.weight": (3, HIDDEN),
    "up.weight": (3, HIDDEN),
    "angles.weight": (3,),
    "norm.weight": (HIDDEN,),
    "head.weight": (VOCABULARY, HIDDEN),
}


def stacked_layout(chunk_bytes: int = 10**6, dtypes: dict[str, torch.dtype] | None = None) -> UpdateLayout:
    """Of an update of all tensors, in bf16 where `dtypes` says nothing else."""
    kinds = dtypes or {}
    metas = [TensorMeta(name, kinds.get(name, torch.bfloat16), shape) for name, shape in SHAPES.items()]
    return plan_layout(metas, chunk_bytes)


def random_buffers(layout: UpdateLayout, seed: int) -> Sequence[torch.Tensor]:
    """The packed buffers of one update with random values."""
    generator = torch.Generator().manual_seed(seed)
    return [
        pack([torch.randn(meta.shape, generator=generator).to(meta.dtype) for meta in part.metas], mark=1)
        for part in layout.buffers
    ]


def memory_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def one_update(loader: PlannedLoader, model: torch.nn.Module, layout: UpdateLayout, seed: int = 0) -> Mode:
    """One whole update with random weights; returns how it began."""
    loader.begin(model, layout)
    mode = loader.mode
    for part, buffer in zip(layout.buffers, random_buffers(layout, seed), strict=True):
        loader.load(model, part, buffer)
    loader.finish()
    return mode
