"""Calls that the trainer can make inside every worker of a server, through `/collective_rpc`.

vLLM mixes `WeightUpdateExtension` into its worker class (`--worker-extension-cls`). Importing this module registers our
transfer engine, before the worker creates it, and what a server with a sent adapter needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.worker_manager import WorkerLoRAManager

from pipelinerl.inference.adapter import adapter_request, load_what_was_sent
from pipelinerl.inference.arguments import ENGINE_NAME, serves_adapter
from pipelinerl.inference.transfer import PackedTransferEngine, checkpoint_tensors, is_tied
from pipelinerl.weights.manifest import ServerModel, folder_checksum, local_folder

if ENGINE_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(ENGINE_NAME, PackedTransferEngine)
if serves_adapter(os.environ):
    load_what_was_sent(WorkerLoRAManager)


def narrow_tensors(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Names of the tensors of `model` that have fewer bits than `dtype`: vLLM rounds what it loads without a word."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, each in tensors if each.is_floating_point() and each.dtype.itemsize < dtype.itemsize]


class WeightUpdateExtension:
    """Methods of the worker; `self` is vLLM's worker. Names are prefixed so that none of vLLM's is hidden."""

    vllm_config: Any
    weight_transfer_engine: Any
    get_model: Callable[[], torch.nn.Module]
    _weight_update_active: bool

    def pipelinerl_abort_update(self) -> dict[str, bool]:
        """Forget an update that failed or was cut short, and leave the trainer's group.

        vLLM's own shutdown of the engine refuses while an update is open, which is just when it is needed.
        """
        was_open = bool(self._weight_update_active)
        self._weight_update_active = False
        self.weight_transfer_engine.abort()
        return {"was_open": was_open}

    def pipelinerl_load_adapter(self) -> None:
        """Load the adapter that was sent. vLLM would do it at the next step, where an error ends the engine."""
        worker: Any = self
        worker.add_lora(adapter_request())

    def pipelinerl_model_info(self) -> dict[str, Any]:
        """What an update has to cover: the fields of `ServerModel`."""
        config = self.vllm_config.model_config
        adapter = serves_adapter(os.environ)
        model = ServerModel(
            tensors=checkpoint_tensors(config),
            tied=is_tied(config),
            dtype=str(config.dtype).removeprefix("torch."),
            adapter_rank=self.vllm_config.lora_config.max_lora_rank if adapter else None,
            rounded=[] if config.quantization else narrow_tensors(self.get_model(), config.dtype),
            base_checksum=folder_checksum(local_folder(config.model, config.revision)) if adapter else None,
        )
        answer: dict[str, Any] = msgspec.to_builtins(model)
        return answer
