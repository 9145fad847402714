"""Which tensors a model folder has, and what a server says of its model. Plain data, no torch."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import msgspec

Shape = tuple[int, ...]

#: Buffers that some checkpoints carry although they are computed from the configuration.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "position_ids")
#: Tensors that predict several tokens at once, which neither trainers nor servers of the plain model load.
_FURTHER_TENSORS = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
_INDEX_FILE = "model.safetensors.index.json"
#: A longer header is not a safetensors header.
_MAX_HEADER_BYTES = 512 * 2**20
#: `folder_checksum` reads so many blocks of a file, evenly spaced: training changes weights everywhere.
CHECKSUM_BLOCKS = 64
CHECKSUM_BLOCK_BYTES = 64 * 1024


class ServerModel(msgspec.Struct, frozen=True):
    """What a server says of its model.

    Attributes:
        tensors: names and shapes in its checkpoint; None: not known (the checkpoint is not in safetensors format).
        tied: the output head is the embedding.
        dtype: of its weights, such as `bfloat16`; None: not told.
        adapter_rank: the largest rank that fits, if updates bring an adapter; None: they bring the model.
        base_checksum: `folder_checksum` of the frozen model under an adapter.
        rounded: tensors that it keeps in fewer bits than `dtype` has, whatever it is sent.
    """

    tensors: dict[str, Shape] | None = None
    tied: bool = False
    dtype: str | None = None
    adapter_rank: int | None = None
    base_checksum: str | None = None
    rounded: list[str] = []


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Where the files of a model are: its folder, or the hub's cache. None: not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    import huggingface_hub  # takes half a second, which the launcher rarely needs

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, local_files_only=True))
    # The second: it can be no name on the hub, as a path that does not exist.
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HFValidationError):
        return None


def read_manifest(folder: Path) -> dict[str, Shape] | None:
    """Names and shapes of the model's tensors in the safetensors files of `folder`; None if it has no such file.

    What a checkpoint has beyond the model, to predict several tokens at once, is left out.

    Raises:
        ValueError: the header of a file cannot be read, or the index cannot.
    """
    files = tensor_files(folder)
    if files is None:
        return None
    tensors: dict[str, Shape] = {}
    further = _further_layers(folder)
    for file in files:
        for name, entry in read_header(file)[1].items():
            layer = _LAYER.match(name)
            is_further = _FURTHER_TENSORS.search(name) or (layer is not None and int(layer[1]) in further)
            if name != "__metadata__" and not is_further:
                tensors[name] = tuple(int(size) for size in entry["shape"])
    return tensors


def _further_layers(folder: Path) -> range:
    """Numbers of the layers that predict further tokens (`num_nextn_predict_layers`); they follow the model's."""
    file = folder / "config.json"
    content = json.loads(file.read_bytes()) if file.is_file() else {}
    config = (content.get("text_config") or content) if isinstance(content, dict) else {}
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    return range(first, first + count) if isinstance(first, int) and isinstance(count, int) else range(0)


def tensor_files(folder: Path) -> list[Path] | None:
    """The safetensors files that hold the model of `folder`; None if it has none.

    If there is an index, only the files that it names count: some publishers put a second copy of the weights into the
    same folder, under other names.

    Raises:
        ValueError: the index cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    index = folder / _INDEX_FILE
    if not index.is_file():
        return files
    content = json.loads(index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: it has no weight_map")
    named = {str(name) for name in weight_map.values()}
    return [file for file in files if file.name in named]


def folder_checksum(folder: Path | None) -> str | None:
    """A hash of names, sizes and samples of the weight files in `folder`; None if it has none in safetensors format.

    Where updates bring an adapter alone, trainer and servers load the frozen model themselves, and a server that is
    restarted loads it during the run: a folder that changed since would be another policy.
    """
    files = [] if folder is None else tensor_files(folder)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        step = max(CHECKSUM_BLOCK_BYTES, (size - CHECKSUM_BLOCK_BYTES) // (CHECKSUM_BLOCKS - 1))
        # The last block is read in any case.
        places = {*range(0, size, step), max(0, size - CHECKSUM_BLOCK_BYTES)}
        with file.open("rb") as content:
            for place in sorted(places):
                content.seek(place)
                digest.update(content.read(CHECKSUM_BLOCK_BYTES))
    return digest.hexdigest()


def read_header(file: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """At which byte the tensors of a safetensors file begin, and its header: 8 bytes length (little endian), then that
    many bytes of JSON (safetensors specification).

    Raises:
        ValueError: there is no such header.
    """
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: not a safetensors file (header of {length} bytes)")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is not an object")
    return 8 + length, header
