"""Which tensors a model has, and whether an update covers them. Plain data: no torch.

The server reads the manifest of the checkpoint that it was started with; the trainer compares it with what it is
about to send, because a server accepts a subset without a word.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

Shape = tuple[int, ...]

#: Buffers that some checkpoints carry although they are computed from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "position_ids")
_TIED_HEAD = "lm_head.weight"
_INDEX_FILE = "model.safetensors.index.json"
#: A header beyond this is not a safetensors header.
_MAX_HEADER_BYTES = 512 * 2**20


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Where the files of a model are: its folder, or the hub's cache. None: not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def read_manifest(folder: Path) -> dict[str, Shape] | None:
    """Names and shapes of every tensor in the safetensors files of `folder`; None if it has no such file.

    If there is an index, only the files that it names count, as for whoever loads them: some publishers put a second
    copy of the weights beside them, under other names.

    Raises:
        ValueError: a file's header cannot be read, or the index cannot.
    """
    files = tensor_files(folder)
    if files is None:
        return None
    tensors: dict[str, Shape] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name != "__metadata__":
                tensors[name] = tuple(int(size) for size in entry["shape"])
    return tensors


def tensor_files(folder: Path) -> list[Path] | None:
    """The safetensors files that hold the model of `folder`; None if it has none. ValueError: as `read_manifest`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    index = folder / _INDEX_FILE
    if index.is_file():
        named = _files_of(index)
        files = [file for file in files if file.name in named]
    return files


def _files_of(index: Path) -> set[str]:
    """Format: `{"weight_map": {name of a tensor: name of its file}}`."""
    content = json.loads(index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: it has no weight_map")
    return {str(name) for name in weight_map.values()}


def _read_header(file: Path) -> dict[str, dict[str, list[int]]]:
    """Format: 8 bytes length (little endian), then that many bytes of JSON (safetensors specification)."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: not a safetensors file (header of {length} bytes)")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is not an object")
    return header


def coverage_problems(expected: Mapping[str, Shape], sent: Mapping[str, Shape], tied: bool) -> list[str]:
    """Everything that is wrong with sending `sent` to a model that expects `expected`, as short sentences.

    `tied`: the output head is the embedding, so that it need not be sent.
    """
    optional = {name for name in expected if name.endswith(_DERIVED_SUFFIXES)}
    if tied:
        optional |= {_TIED_HEAD}
    problems = []
    if missing := sorted(set(expected) - set(sent) - optional):
        problems.append(f"{len(missing)} tensors are left out: {_some(missing)}")
    if unknown := sorted(set(sent) - set(expected) - optional):
        problems.append(f"{len(unknown)} tensors are unknown to the model: {_some(unknown)}")
    wrong = sorted(name for name in set(sent) & set(expected) if tuple(sent[name]) != tuple(expected[name]))
    problems += [f"{name}: got shape {list(sent[name])}, the model has {list(expected[name])}" for name in wrong[:4]]
    if len(wrong) > 4:
        problems.append(f"{len(wrong) - 4} more tensors have wrong shapes")
    return problems


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
