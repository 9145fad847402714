"""Weight transfer to a server that shares the trainer's device, where NCCL cannot be used.

Only handles travel, over a loopback connection; the workers copy the buffers on the device. On a GPU a handle is a CUDA
IPC handle, on a CPU (for tests) a file in memory. Handles are plain JSON: vLLM's own engine pickles them.

Each line is one JSON object. A worker must present the secret that it received over the server's authenticated control
route; a silent caller blocks nobody. It copies each buffer before it answers, because loading keeps tensors longer than
the trainer keeps the buffer. Every operation has a timeout; when one end closes, the other end's operation fails at
once.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from pipelinerl.weights.transport import Ends, SenderOptions, listen

Handle = dict[str, Any]

#: From a worker's connection to the secret.
HANDSHAKE_S = 10.0
_MAX_LINE_BYTES = 65536
_LOOPBACK = "127.0.0.1"
_BYTES_FIELDS = ("memory", "ref_counter", "event")


class HandleSender:
    """The trainer's end: offers the handle of one buffer after another to all workers of a server."""

    def __init__(self, options: SenderOptions) -> None:
        self._options = options
        self._timeout_s = options.timeout_s
        self._secret = secrets.token_urlsafe(24)
        self._num_workers = 0
        self._listener: socket.socket | None = None
        self._workers: list[_Lines] = []

    def prepare(self, num_workers: int) -> dict[str, Any]:
        self._num_workers = num_workers
        self._listener = listen(_LOOPBACK, self._options.port)
        port = int(self._listener.getsockname()[1])
        transport = self._options.transport
        return {"transport": transport, "port": port, "secret": self._secret, "timeout_s": self._timeout_s}

    def join(self) -> None:
        listener = self._listener
        if listener is None:
            raise RuntimeError("ipc sender: prepare() comes before join()")
        joined: SimpleQueue[_Lines | None] = SimpleQueue()
        threading.Thread(target=_accept, args=(listener, self._secret, joined), name="ipc-accept", daemon=True).start()
        deadline = time.monotonic() + self._timeout_s
        while len(self._workers) < self._num_workers:
            lines = None
            with contextlib.suppress(Empty):
                lines = joined.get(timeout=max(0.0, deadline - time.monotonic()))
            if lines is None:
                numbers = f"{len(self._workers)} of {self._num_workers}"
                raise RuntimeError(f"ipc sender: {numbers} workers connected before it was closed or timed out")
            lines.set_timeout(self._timeout_s)
            lines.send({"welcome": True})
            self._workers.append(lines)

    def send(self, buffer: torch.Tensor) -> None:
        if self._listener is None:
            raise RuntimeError("ipc sender: it is not open")
        if buffer.is_cuda:
            if self._options.device_index is not None:
                # Senders are called in threads of their own, where another GPU may be current.
                torch.cuda.set_device(self._options.device_index)
            # Frees the memory of buffers that all readers gave back.
            torch.cuda.ipc_collect()
        handle = export_buffer(buffer)
        try:
            self._offer(handle)
        finally:
            release_buffer(handle)

    def _offer(self, handle: Handle) -> None:
        """Have every worker copy the buffer. RuntimeError quotes a worker that could not."""
        for worker in self._workers:
            worker.send(handle)
        for worker in self._workers:
            answer = worker.receive()
            if "error" in answer:
                raise RuntimeError(f"ipc sender: a worker could not read the buffer: {answer['error']}")

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            # Ends the thread that waits in `accept`.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for worker in self._workers:
            worker.close()


class HandleReceiver:
    """A worker's end."""

    def __init__(self, port: int, secret: str, timeout_s: float, device: torch.device) -> None:
        try:
            connection = socket.create_connection((_LOOPBACK, port), timeout_s)
        except OSError as error:
            raise RuntimeError(f"ipc receiver: the trainer does not listen at port {port}: {error}") from error
        self._device = device
        self._lines = _Lines(connection, timeout_s)
        self._lines.send({"secret": secret})
        self._lines.receive()

    def receive(self, num_bytes: int) -> torch.Tensor:
        """A copy of the next buffer; its size is that of the sender's, which the checksum check compares."""
        handle = self._lines.receive()
        try:
            buffer = copy_of_buffer(handle, self._device)
        except (RuntimeError, ValueError, KeyError) as error:
            self._lines.send({"error": f"{type(error).__name__}: {error}"})
            raise RuntimeError(f"ipc receiver: {error}") from error
        self._lines.send({"done": True})
        return buffer

    def close(self) -> None:
        self._lines.close()


def _open_receiver(details: dict[str, Any], worker: int, device: torch.device) -> HandleReceiver:
    return HandleReceiver(details["port"], details["secret"], details["timeout_s"], device)


IPC = Ends(HandleSender, _open_receiver)


class _Lines:
    """JSON lines over one socket."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """How long each operation may take."""
        self._socket.settimeout(timeout_s)

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next object. RuntimeError: the other end is gone, too slow, or sent something else."""
        try:
            line = self._file.readline(_MAX_LINE_BYTES)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"ipc connection: {type(error).__name__}: {error}") from error
        if not line.endswith(b"\n"):
            raise RuntimeError("ipc connection: the other end closed it")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise RuntimeError(f"ipc connection: got {line[:80]!r}, expected an object")
        return message

    def close(self) -> None:
        # Closing alone would leave a thread that reads from it waiting.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _accept(listener: socket.socket, secret: str, joined: SimpleQueue[_Lines | None]) -> None:
    """Put the callers that show the secret into `joined`, and None once the listener is closed."""

    def greet(connection: socket.socket) -> None:
        lines = _Lines(connection, HANDSHAKE_S)
        if _shows(lines, secret):
            joined.put(lines)
        else:
            lines.close()

    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=greet, args=(connection,), name="ipc-greet", daemon=True).start()
    joined.put(None)


def _shows(lines: _Lines, secret: str) -> bool:
    try:
        shown = lines.receive().get("secret")
        # A lone surrogate, which JSON allows and UTF-8 does not, is a ValueError too.
        return isinstance(shown, str) and hmac.compare_digest(shown.encode(), secret.encode())
    except (RuntimeError, ValueError):
        return False


def export_buffer(buffer: torch.Tensor) -> Handle:
    """Describe `buffer` (contiguous, uint8), which must stay as it is until every reader is done.

    What wrote it must be complete, or on the current stream. A buffer of the CPU is copied into memory that this user's
    processes can map, and that ends with this process.
    """
    if buffer.is_cuda:
        return _export_cuda(buffer)
    fd = os.memfd_create("pipelinerl-weights")
    os.truncate(fd, max(1, buffer.numel()))
    handle = {"kind": "file", "pid": os.getpid(), "fd": fd, "num_bytes": buffer.numel()}
    _mapped(handle).copy_(buffer)
    return handle


def release_buffer(handle: Handle) -> None:
    """Free what `export_buffer` made. Every reader is done."""
    if handle["kind"] == "file":
        os.close(handle["fd"])


def _mapped(handle: Handle) -> torch.Tensor:
    path, size = f"/proc/{int(handle['pid'])}/fd/{int(handle['fd'])}", int(handle["num_bytes"])
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def copy_of_buffer(handle: Handle, device: torch.device) -> torch.Tensor:
    """A copy of the described buffer on `device`; the sender may reuse its own as soon as this returns.

    Raises:
        ValueError: the handle is of another kind than this device, or it is none.
        RuntimeError: this process cannot open it (another GPU, a sender that is gone).
    """
    kind = handle.get("kind")
    if kind == "file" and device.type == "cpu":
        return _mapped(handle).clone()
    if kind == "cuda" and device.type == "cuda":
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        own = torch.cuda.current_device() if device.index is None else device.index
        source = _open_cuda(handle, place_of(handle.get("gpu"), uuids, own))
        copy = torch.empty_like(source, device=torch.device("cuda", own)).copy_(source)
        torch.cuda.synchronize(device)
        return copy
    raise ValueError(f"buffer handle: got kind {kind!r} for {device}, expected one of that device")


def place_of(gpu: str | None, uuids: Sequence[str], own: int) -> int:
    """Index, in this process, of the GPU that holds a buffer; the index in the sender's process may differ.

    A worker of a parallel server has another GPU than the trainer and opens the buffer where it lies.

    Args:
        gpu: UUID in the handle; None: the sender did not say.
        uuids: of the GPUs that this process sees, by index.
        own: of the GPU that this process works on; also the answer if the other one cannot be seen.
    """
    return uuids.index(gpu) if gpu in uuids else own


def _export_cuda(buffer: torch.Tensor) -> Handle:
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
