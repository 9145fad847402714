"""Named tensors in safetensors files, bit by bit. No pickle: a checkpoint is data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipelinerl.errors import UserError
from pipelinerl.finetune.ranks import Ranks

#: Folder of a training state that holds weights and optimizer.
STATE = "state"


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to `file`. OSError if the disk refuses them."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, str(file), metadata)
    except Exception as error:
        # safetensors reports a full disk with an error class of its own.
        raise OSError(f"{file}: {error}") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, or of the files in a folder, on the CPU."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in load_file(str(file)).items()}


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write `tensors`, sharded or the same on all ranks, to `folder`. All ranks take part.

    Raises:
        OSError: the disk refuses them.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _single_process_is_fine():
            save(dict(tensors), storage_writer=writer, process_group=ranks.host_group, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        raise OSError(f"{folder}: {error}") from error


def flat_share(piece: torch.Tensor, offset: int, total: int, ranks: Ranks) -> torch.Tensor:
    """A flat tensor of `total` elements for `save_tensors` and `load_tensors`, of which this rank has `piece`, from
    element `offset` on. All ranks call it; together they have each element once."""
    shards = []
    if len(piece) > 0:
        placement = f"rank:{ranks.rank}/{piece.device}"
        metadata = ShardMetadata(shard_offsets=[offset], shard_sizes=[len(piece)], placement=placement)
        shards.append(Shard(piece, metadata))
    return init_from_local_shards(shards, total, process_group=ranks.host_group)


def saved_names(folder: Path) -> list[str]:
    """Names of the tensors in `folder`. UserError if there are none."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist: another version wrote this training state. Resume with that version, or start "
            "from finetune/current in a new output_dir."
        )
    return sorted(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def load_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Fill `tensors` from `folder`, whatever number of ranks wrote it. All ranks take part.

    Raises:
        ValueError: names or shapes differ.
    """
    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    if different := sorted(saved.keys() ^ tensors.keys()):
        raise ValueError(f"{folder}: names differ from those of the model: {different[:5]}")
    for name, tensor in tensors.items():
        if tensor.shape != getattr(saved[name], "size", None):
            raise ValueError(f"{folder}: {name} differs in shape from the model's, {list(tensor.shape)}")
    with _single_process_is_fine():
        load(dict(tensors), storage_reader=reader, process_group=ranks.host_group, no_dist=ranks.world_size == 1)


@contextmanager
def _single_process_is_fine() -> Iterator[None]:
    """torch warns without a process group, also if `no_dist` says that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
