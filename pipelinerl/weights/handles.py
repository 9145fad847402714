"""Buffers that another process of this machine reads in place: what is sent is a description, not the bytes.

Used by both ends of `ipc_transport`. On a GPU the description is a CUDA IPC handle, which a process that sees the same
GPU opens; on a CPU (for tests) it is a mapped file. It is plain JSON: nothing is pickled.
"""

from __future__ import annotations

import base64
import tempfile
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
        copy = _open_cuda(handle, device).clone()
        torch.cuda.synchronize(device)
        return copy
    raise ValueError(f"buffer handle: got kind {kind!r} for {device}, expected one of that device")


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


def _open_cuda(handle: Handle, device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    raw = {name: base64.b64decode(handle[name]) for name in _BYTES_FIELDS}
    tensor: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size([handle["num_bytes"]]),
        (1,),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        # The sender's index of the GPU says nothing here: the handle itself knows the memory.
        device.index,
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
