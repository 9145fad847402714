"""Buffers that another process of this machine reads in place: what is sent is a description, not the bytes.

Used by both ends of `ipc_transport`. On a GPU the description is a CUDA IPC handle, which a process that sees the same
GPU opens; on a CPU (for tests) it is a mapped file. It is plain JSON: nothing is pickled.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Handle = dict[str, Any]


def export_buffer(buffer: torch.Tensor, folder: Path) -> Handle:
    """Describe `buffer` (contiguous, uint8). It must stay as it is until every reader is done.

    What wrote it must be complete, or on the current stream.

    Args:
        folder: where a buffer of the CPU is put; readable by this user only.
    """
    if buffer.is_cuda:
        return _export_cuda(buffer)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.truncate(max(1, buffer.numel()))
    mapped = torch.from_file(file.name, shared=True, size=buffer.numel(), dtype=torch.uint8)
    mapped.copy_(buffer)
    return {"kind": "file", "path": file.name, "num_bytes": buffer.numel()}


def release_buffer(handle: Handle) -> None:
    """Take back what `export_buffer` left on the disk. Every reader is done."""
    if handle["kind"] == "file":
        Path(handle["path"]).unlink(missing_ok=True)


def copy_of_buffer(handle: Handle, device: torch.device) -> torch.Tensor:
    """A copy of the described buffer, on `device`; the sender may reuse its own as soon as this returns.

    Raises:
        ValueError: the handle is of another kind than this device, or it is none.
        RuntimeError: this process cannot open it (another GPU, a sender that is gone).
    """
    kind = handle.get("kind")
    if kind == "file" and device.type == "cpu":
        shared = torch.from_file(handle["path"], shared=True, size=int(handle["num_bytes"]), dtype=torch.uint8)
        return shared.clone()
    if kind == "cuda" and device.type == "cuda":
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        own = torch.cuda.current_device() if device.index is None else device.index
        source = _open_cuda(handle, place_of(handle.get("gpu"), uuids, own))
        copy = torch.empty_like(source, device=torch.device("cuda", own)).copy_(source)
        torch.cuda.synchronize(device)
        return copy
    raise ValueError(f"buffer handle: got kind {kind!r} for {device}, expected one of that device")


def place_of(gpu: str | None, uuids: Sequence[str], own: int) -> int:
    """Index, in this process, of the GPU that holds a buffer. The sender's own index says nothing here.

    A worker of a parallel server has another GPU than the trainer and opens the buffer where it lies, to copy it over.

    Args:
        gpu: UUID in the handle; None: the sender did not say.
        uuids: of the GPUs that this process sees, by index.
        own: of the GPU that this process works on; also the answer if the other one cannot be seen.
    """
    return uuids.index(gpu) if gpu in uuids else own


_BYTES_FIELDS = ("memory", "ref_counter", "event")


def _export_cuda(buffer: torch.Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    # The readers' copies run on streams of their own. Not the whole GPU: a broadcast to another server may hang on it.
    torch.cuda.current_stream(buffer.device).synchronize()
    _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    (_, size, _, offset, _, _, _, memory, storage_bytes, storage_offset, _, counter, counter_offset, event, sync) = (
        arguments
    )
    handle = {
        "kind": "cuda",
        "gpu": str(torch.cuda.get_device_properties(buffer.device).uuid),
        "num_bytes": int(size[0]),
        "offset": int(offset),
        "memory": memory,
        "storage_bytes": int(storage_bytes),
        "storage_offset": int(storage_offset),
        "ref_counter": counter,
        "ref_counter_offset": int(counter_offset),
        "event": event,
        "event_sync": bool(sync),
    }
    return handle | {name: base64.b64encode(handle[name]).decode() for name in _BYTES_FIELDS}


def _open_cuda(handle: Handle, index: int) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    raw = {name: base64.b64decode(handle[name]) for name in _BYTES_FIELDS}
    tensor: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size([handle["num_bytes"]]),
        (1,),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        index,
        raw["memory"],
        handle["storage_bytes"],
        handle["storage_offset"],
        False,
        raw["ref_counter"],
        handle["ref_counter_offset"],
        raw["event"],
        handle["event_sync"],
    )
    return tensor
