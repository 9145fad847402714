"""The adapter of a server that holds the frozen base model: every request uses it, an update replaces it.

vLLM does the work: it wraps the layers (`--enable-lora`), slices A and B for its workers, and adds their product to
what a layer gives. But vLLM cannot load an adapter that was never in a folder. So the scheduler attaches one adapter to
every request (`inference.engine`), and when vLLM's worker is to load it, it loads what was sent last. Before
the first update it loads zeros: the server is its base model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from pipelinerl.weights.buffers import A_SUFFIX, NamedTensors, adapter_problems
from pipelinerl.weights.manifest import Shape

_ID = 1
_NAME = "policy"
#: Where other adapters have their folder. Nothing is read there.
_NOWHERE = "pipelinerl:sent-by-the-trainer"
_MARK = "pipelinerl_loads_what_was_sent"
_SENT = "pipelinerl_sent"


class AdapterLoading:
    """Collects the tensors of an update and gives them to vLLM at its end; nothing changes before (`transfer.Loading`).

    Args:
        model: with vLLM's manager of adapters.
        checkpoint: names and shapes of its checkpoint, if they are known.
    """

    def __init__(self, model: Any, checkpoint: Mapping[str, Shape] | None) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self, is_noted: bool) -> None:
        self._tensors = {}

    def problems(self, sent: Mapping[str, Shape]) -> list[str]:
        rank = self._model.lora_manager.lora_config.max_lora_rank
        if problems := adapter_problems(self._checkpoint, sent, rank):
            return problems
        unwrapped = unwrapped_layers(self._model, list(sent))
        return [f"{layer} has no room for an adapter in this server" for layer in unwrapped]

    def load(self, tensors: NamedTensors) -> list[str]:
        """Keep these tensors: they are views of a buffer that nothing else writes to."""
        self._tensors.update(tensors)
        return []  # `problems` has found a layer for each

    def finish(self) -> None:
        replace_adapter(self._model, self._tensors)
        self._tensors = {}


def adapter_request() -> LoRARequest:
    """What every request of such a server names as its adapter."""
    return LoRARequest(lora_name=_NAME, lora_int_id=_ID, lora_path=_NOWHERE)


def load_what_was_sent(worker_manager: Any) -> None:
    """Change how vLLM's class of worker managers loads our adapter; a second call changes nothing.

    vLLM loads an adapter whenever a step needs one that is not in its slot, and empties the slots at the end of every
    update.
    """
    load = worker_manager._load_adapter
    if getattr(load, _MARK, False):
        return

    @functools.wraps(load)
    def load_adapter(self: Any, request: LoRARequest) -> LoRAModel:
        adapter: LoRAModel
        manager = self._adapter_manager
        if request.lora_path != _NOWHERE:
            adapter = load(self, request)
        elif tensors := getattr(manager, _SENT, None):
            adapter = _adapter_of(manager, tensors)
        else:
            rank = self.get_dummy_lora_warmup_rank(1)
            adapter = manager.create_dummy_lora(_ID, rank, self.embedding_modules)
        return adapter

    setattr(load_adapter, _MARK, True)
    worker_manager._load_adapter = load_adapter


def unwrapped_layers(model: Any, names: Sequence[str]) -> list[str]:
    """Layers of an adapter that this server's model does not have, or does not wrap; vLLM would skip them.

    Args:
        model: with vLLM's manager of adapters.
        names: of the adapter's tensors.
    """
    manager = model.lora_manager
    places: set[str] = set()
    for layer in manager.modules:
        places.update(manager.packed_modules.get(layer, (layer,)))
    mapper = _mapper_of(model)
    return sorted({layer for name in names if (layer := parse_fine_tuned_lora_name(name, mapper)[0]) not in places})


def replace_adapter(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """From now on the server's adapter is `tensors`; vLLM copies them into the slot that its computations read.

    Args:
        model: with vLLM's manager of adapters.
        tensors: the whole adapter: `LAYER.lora_A.weight` and `LAYER.lora_B.weight`, B with its scale in it. They are
            kept. A layer that is not among them gets zeros.
    """
    setattr(model.lora_manager, _SENT, dict(tensors))
    model.lora_manager.remove_adapter(_ID)


def _adapter_of(manager: Any, tensors: Mapping[str, torch.Tensor]) -> LoRAModel:
    """As vLLM has one after reading a folder."""
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(A_SUFFIX))
    return LoRAModel.from_lora_tensors(
        _ID,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper_of(manager.model),
    )


def _mapper_of(model: Any) -> Any:
    """From names of a checkpoint's layers to those of vLLM, where they differ."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
