"""Calls that the trainer can make inside every worker of a server, through `/collective_rpc`.

vLLM mixes `WeightUpdateExtension` into its worker class (`--worker-extension-cls`). Importing this module registers
our transfer engines, before the worker creates one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.inference import plugin
from pipelinerl.inference.reload import roll_back
from pipelinerl.weights.manifest import read_manifest

plugin.register()


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

    def pipelinerl_model_info(self) -> dict[str, Any]:
        """What an update has to cover: `tensors` {name: shape} of the checkpoint that this server was started with
        (null if it is not in safetensors format), `tied` embeddings, `dtype` of the model."""
        config = self.vllm_config.model_config
        text_config = config.hf_config.get_text_config()
        folder = _local_folder(config.model, config.revision)
        tensors = read_manifest(folder) if folder is not None else None
        return {
            "tensors": None if tensors is None else {name: list(shape) for name, shape in tensors.items()},
            "tied": bool(getattr(text_config, "tie_word_embeddings", False)),
            "dtype": str(config.dtype).removeprefix("torch."),
        }


def _local_folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
