"""Keeps the trainer's parameters at values that servers can have, the fp32 rest beside.

Used by the plain backend and by FSDP2 (on its shards); a frozen reference model is rounded once.

Servers hold weights in 16 bits. A trainer that computes with fp32 weights follows another policy than the one that
sampled: it sees the part of every update that rounding takes away, and the difference grows from step to step. So the
forward and backward passes run on the rounded values, as with all mixed precision training (Micikevicius et al. 2018,
section 3.1), and the optimizer updates the sums, the fp32 master weights.

Products in bf16 round the matrices of linear layers by themselves. What else a model computes with is rounded here:
norms and other vectors, embeddings, experts that do not follow autocast. With products in fp32 or TF32 it is every
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.pytorch_utils import Conv1D

from pipelinerl.finetune.experts import own_experts_parameters


class ServedValues:
    """Parameters at values of `dtype`, and what the fp32 master weights have beyond them.

    Args:
        parameters: fp32, sharded or not. The rest of a trained one is kept in another fp32 tensor of its kind; a frozen
            one is rounded for good.
        dtype: of the weights in the servers. What is beyond its range becomes its largest number, the rest is kept:
            it is refused by name when it is sent.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._rests: list[torch.Tensor] = [torch.empty_like(parameter) for parameter in self._trained]
        self._places = {id(parameter): place for place, parameter in enumerate(self._trained)}
        round_for_good([parameter for parameter in parameters if not parameter.requires_grad], dtype)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Take the parameters as master weights and round them. What is taken away is kept exactly."""
        for parameter, rest in zip(self._trained, self._rests, strict=True):
            rest.copy_(parameter)
            parameter.copy_(_narrowed(rest, self.dtype))
            # Exact: the difference of two floats so close has no more digits than the larger of them.
            rest.sub_(parameter.to(rest.device))

    @contextmanager
    def masters(self) -> Iterator[None]:
        """The parameters are the master weights inside, and whatever they are then is rounded at the end."""
        with torch.no_grad():
            for parameter, rest in zip(self._trained, self._rests, strict=True):
                parameter.add_(rest.to(parameter.device))
        try:
            yield
        finally:
            self.round()

    def move_rests(self, device: torch.device) -> None:
        """Keep what the rounded values lack on `device`."""
        self._rests = [rest.to(device) for rest in self._rests]

    def value_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The master weight of `parameter` as a tensor of its own; of a parameter that is not rounded it is itself."""
        place = self._places.get(id(parameter))
        return parameter if place is None else parameter.detach() + self._rests[place].to(parameter.device)

    def values_in(self, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """A function from a parameter to what is cast to `dtype`, so that each master weight is rounded once.

        In the servers' dtype the parameter itself is right, and rests that wait in host memory stay there. Not so in
        float16: it hides what is beyond the range.
        """
        if dtype == self.dtype != torch.float16:
            return lambda name, parameter: parameter
        return self.value_of


def round_for_good(parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Round frozen parameters to values of `dtype`; nothing is kept of what is taken away."""
    for parameter in parameters:
        parameter.data.copy_(_narrowed(parameter.data, dtype))


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:
        # An infinite weight would leave nothing to get the master back from.
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def parameters_to_round(
    language_model: torch.nn.Module, computed: torch.dtype, served: torch.dtype, *, is_merged: bool
) -> list[torch.nn.Parameter]:
    """The parameters that products in `computed` would use with more digits than `served` has.

    Only matrices of linear layers, and experts that follow autocast, are sure to be rounded by their products. Other
    products of experts may take weights as they are, biases may be added in fp32, and some vectors have two or three
    dimensions.
    Adapters whose servers get the merged matrix (`is_merged`), which nobody holds here, are left alone.
    """
    if torch.finfo(served).bits >= 32:
        return []
    linear = {id(m.weight) for m in language_model.modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    # A head that is tied to the embedding is a linear layer too, but the embedding is looked up in fp32.
    linear -= {id(m.weight) for m in language_model.modules() if isinstance(m, torch.nn.Embedding)}
    spared = linear if computed == served or is_merged else set()
    if computed == served:
        spared |= {id(parameter) for parameter in own_experts_parameters(language_model)}
    return [p for p in language_model.parameters() if p.dtype == torch.float32 and id(p) not in spared]
