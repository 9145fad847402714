"""One update after another of a server's adapter: nothing changes before all of it is there. Used by `reload`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipelinerl.inference.resident_adapter import layers_without_place, replace_adapter
from pipelinerl.weights.adapter_manifest import adapter_problems


class AdapterUpdates:
    """Collects the tensors of an update and gives them to vLLM at its end.

    Args:
        model: with vLLM's manager of adapters.
        checkpoint: names and shapes of its checkpoint, if they are known.
    """

    def __init__(self, model: Any, checkpoint: Mapping[str, tuple[int, ...]] | None) -> None:
        self.model = model
        self._checkpoint = checkpoint
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Forget what an update that failed has left."""
        self._tensors = {}

    def problems(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[str]:
        """What is wrong with an adapter of these tensors, before they are received."""
        sent = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
        rank = self.model.lora_manager.lora_config.max_lora_rank
        if problems := adapter_problems(self._checkpoint, sent, rank):
            return problems
        return [f"{layer} takes no adapter in this server" for layer in layers_without_place(self.model, names)]

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Keep these tensors; they are views of a buffer that nobody writes to any more."""
        self._tensors.update(tensors)

    def finish(self) -> None:
        """All of the update has come: put it into the adapter's place."""
        replace_adapter(self.model, self._tensors)
        self._tensors = {}
