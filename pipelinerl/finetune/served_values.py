"""Keeps the trainer's parameters at values that servers can have, the fp32 rest beside. Used by the plain backend.

Servers hold weights in 16 bits. A trainer that computes with fp32 weights follows another policy than the one that
sampled: it sees the part of every update that rounding takes away, and the difference grows from step to step. So the
forward and backward passes run on the rounded values, as with all mixed precision training (Micikevicius et al. 2018,
section 3.1), and the optimizer updates the sums, the fp32 master weights.

Products in bf16 round matrices by themselves. What else a model computes with is rounded here: norms and other vectors,
and embeddings. With products in fp32 or TF32 it is every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class ServedValues:
    """Parameters at values of `dtype`, and what the fp32 master weights have beyond them.

    Args:
        parameters: fp32. The rest of a trained one is kept in another fp32 tensor; a frozen one is rounded for good.
        dtype: of the weights in the servers.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._rests: list[torch.Tensor] = [torch.empty_like(parameter) for parameter in self._trained]
        self._places = {id(parameter): place for place, parameter in enumerate(self._trained)}
        for parameter in parameters:
            if not parameter.requires_grad:
                parameter.data.copy_(parameter.data.to(dtype))
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Take the parameters as master weights and round them. What is taken away is kept exactly."""
        for parameter, rest in zip(self._trained, self._rests, strict=True):
            master = parameter.detach().clone()
            parameter.copy_(master.to(self.dtype))
            # Exact: the difference of two floats so close has no more digits than the larger of them.
            rest.copy_(master.sub_(parameter))

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


def parameters_to_round(
    language_model: torch.nn.Module, computed: torch.dtype, served: torch.dtype, *, has_adapters: bool
) -> list[torch.nn.Parameter]:
    """The parameters that products in `computed` would use with more digits than `served` has.

    Adapters are left alone: servers get the merged matrix, which nobody holds here.
    """
    if torch.finfo(served).bits >= 32:
        return []
    wide = {id(p) for m in language_model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(False)}
    biases = {id(m.bias) for m in language_model.modules() if isinstance(m, torch.nn.Linear) and m.bias is not None}
    only_what_products_leave = computed == served or has_adapters
    chosen = []
    for parameter in language_model.parameters():
        if parameter.dtype != torch.float32:
            continue
        is_multiplied = (parameter.ndim > 1 and id(parameter) not in wide) or id(parameter) in biases
        if not (is_multiplied and only_what_products_leave):
            chosen.append(parameter)
    return chosen
