"""The model as a Hugging Face folder: `finetune/intermediate/<step>/`, with `finetune/current` pointing to the newest.

Called by the loop of every rank (a sharded model is gathered bucket by bucket); rank 0 writes. `current` is a symbolic
link that is replaced in one atomic step, so a reader sees the old model or the new one, never a mixture.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from pipelinerl.finetune.backends.tensor_files import write_tensors
from pipelinerl.finetune.checkpoint import remove_folder
from pipelinerl.finetune.durable import finish_folder, point_link, start_folder
from pipelinerl.finetune.lora import ADAPTER, has_adapters, is_adapter_part, save_adapter
from pipelinerl.finetune.policy import VALUE_HEAD, PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.llm.tokenizer import load_tokenizer
from pipelinerl.weights.source import CollectiveSource, WeightSource

logger = logging.getLogger(__name__)


class ModelExporter:
    """Writes the policy to `root/intermediate/<step>` and moves the link `root/current`.

    Args:
        tokenizer_path: model folder or name whose tokenizer goes along.
        keep_intermediate: keep older exports; else only the newest and those of `keep_steps` stay.
    """

    def __init__(
        self,
        root: Path,
        tokenizer_path: str,
        ranks: Ranks,
        keep_intermediate: bool = True,
        keep_steps: frozenset[int] = frozenset(),
    ) -> None:
        self._root = root
        self._tokenizer_path = tokenizer_path
        self._ranks = ranks
        self._keep_intermediate = keep_intermediate
        self._keep_steps = keep_steps

    def export(self, step: int, policy: PolicyModel, source: WeightSource) -> Path:
        """Write the weights of `source` and return the folder. Raises OSError if the disk does not take them."""
        final = self._root / "intermediate" / str(step)
        if not self._ranks.is_first:
            if isinstance(source, CollectiveSource):
                source.follow()
            return final
        try:
            weights = {name: tensor.to("cpu", copy=True) for bucket in source.buckets() for name, tensor in bucket}
        finally:
            if isinstance(source, CollectiveSource):
                source.done()
        partial = start_folder(final)
        dtype = next(iter(weights.values())).dtype
        _write_model(partial, policy, weights, dtype)
        load_tokenizer(self._tokenizer_path).save_pretrained(partial)
        finish_folder(final)
        point_link(self._root / "current", final)
        if not self._keep_intermediate:
            self._prune(step)
        return final

    def _prune(self, newest: int) -> None:
        for folder in (self._root / "intermediate").iterdir():
            if folder.name.isdecimal() and int(folder.name) not in self._keep_steps | {newest}:
                remove_folder(folder)


def _write_model(folder: Path, policy: PolicyModel, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    model = policy.language_model
    prefix = f"{VALUE_HEAD}."
    head = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
    if has_adapters(policy):
        save_adapter(folder / ADAPTER, policy, weights)
        weights = {name: tensor for name, tensor in weights.items() if not is_adapter_part(name)}
    save_torch_state_dict(weights, folder, max_shard_size="5GB", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        content = model.generation_config.to_diff_dict()
        (folder / "generation_config.json").write_text(json.dumps(content, indent=1) + "\n")
    if head:
        # In a folder of its own: servers load every tensor file that lies beside config.json.
        (folder / VALUE_HEAD).mkdir()
        write_tensors(folder / VALUE_HEAD / "model.safetensors", head)
