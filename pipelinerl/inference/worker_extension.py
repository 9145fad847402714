"""Calls that the trainer can make inside every worker of a server, through `/collective_rpc`.

vLLM mixes `WeightUpdateExtension` into its worker class (`--worker-extension-cls`). Importing this module registers
our transfer engines, before the worker creates one, and what a server with a sent adapter needs.
"""

from __future__ import annotations

import os
import time
from typing import Any

from pipelinerl.inference import plugin
from pipelinerl.inference.adapter_room import serves_adapter
from pipelinerl.inference.in_place import checkpoint_tensors, is_tied, print_of_checkpoint
from pipelinerl.inference.reload import roll_back

plugin.register()
if serves_adapter(os.environ):
    from vllm.lora.worker_manager import WorkerLoRAManager

    from pipelinerl.inference.resident_adapter import adapter_request, load_what_was_sent

    load_what_was_sent(WorkerLoRAManager)

_PARTS = ("start", "transfer", "load")


class WeightUpdateExtension:
    """Methods of the worker; `self` is vLLM's worker. Names are prefixed so that none of vLLM's is hidden."""

    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def pipelinerl_abort_update(self) -> dict[str, bool]:
        """Forget an update that failed or was cut short, and leave the trainer's group.

        vLLM's own shutdown of the engine refuses while an update is open, which is just when it is needed.
        """
        was_open = bool(self._weight_update_active)
        self._weight_update_active = False
        engine = self.weight_transfer_engine
        engine.reset_weight_update_target()
        roll_back(engine.model)
        engine.shutdown()
        return {"was_open": was_open}

    def pipelinerl_whole_update(self, update_info: dict[str, Any]) -> dict[str, float]:
        """Start, receive and finish in one call; returns the seconds of the three parts. The server is paused."""
        worker: Any = self
        times = [time.monotonic()]
        worker.start_weight_update()
        times.append(time.monotonic())
        worker.update_weights(update_info)
        times.append(time.monotonic())
        worker.finish_weight_update()
        if serves_adapter(os.environ):
            # vLLM would do it at the next step, where an error ends the engine.
            worker.add_lora(adapter_request())
        times.append(time.monotonic())
        return {name: end - begin for name, begin, end in zip(_PARTS, times, times[1:], strict=False)}

    def pipelinerl_model_info(self) -> dict[str, Any]:
        """What an update has to cover: `tensors` {name: shape} of the checkpoint that this server was started with
        (null if it is not in safetensors format), `tied` embeddings, `dtype` of the model, whether a `whole_update` in
        one call is served. If updates bring an adapter and not the model: `adapter_rank`, the largest that fits, and
        `base_print` of the model."""
        config = self.vllm_config.model_config
        tensors = checkpoint_tensors(config)
        info: dict[str, Any] = {
            "tensors": None if tensors is None else {name: list(shape) for name, shape in tensors.items()},
            "tied": is_tied(config),
            "dtype": str(config.dtype).removeprefix("torch."),
            "whole_update": True,
        }
        if serves_adapter(os.environ):
            info["adapter_rank"] = self.vllm_config.lora_config.max_lora_rank
            info["base_print"] = print_of_checkpoint(config)
        return info
