"""Weights as Hugging Face's tensor files, written shard by shard while they come. Called by the model export.

A model that is gathered bucket by bucket is never whole in memory: at most one shard waits to be written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from pipelinerl.finetune.backends.tensor_files import write_tensors
from pipelinerl.weights.buffers import plan_chunks
from pipelinerl.weights.source import TensorMeta

MAX_SHARD_BYTES = 5 * 10**9
_FORMAT = {"format": "pt"}


class ShardWriter:
    """Takes the tensors of `metas` in their order and writes them into `folder`, in files of about `max_bytes`.

    One file is `model.safetensors`; several are numbered and have an index beside them.
    """

    def __init__(self, folder: Path, metas: Sequence[TensorMeta], max_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._shards = [[meta.name for meta in chunk] for chunk in plan_chunks(metas, max_bytes)]
        self._total_bytes = sum(meta.num_bytes for meta in metas)
        self._written = 0
        self._pending: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor (it is copied); a shard that is complete goes to the disk. Raises OSError if that fails."""
        self._pending[name] = tensor.to("cpu", copy=True)
        names = self._shards[self._written]
        if len(self._pending) == len(names):
            write_tensors(self._folder / self._file(self._written), self._pending, _FORMAT)
            self._pending = {}
            self._written += 1

    def close(self) -> None:
        """Write the index if there are several files. ValueError if tensors are missing."""
        if self._written != len(self._shards):
            missing = [name for name in self._shards[self._written] if name not in self._pending]
            raise ValueError(f"export: got no tensors for {missing[:5]}")
        if len(self._shards) > 1:
            files = {name: self._file(number) for number, names in enumerate(self._shards) for name in names}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": files}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    def _file(self, number: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
