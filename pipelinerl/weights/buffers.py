"""The tensors of an update: where they come from, whether they fit a server's model, how they are packed, and how a
receiver knows that they arrived.

A source declares names, dtypes and shapes without gathering anything, and yields tensors bucket by bucket, so that
a sharded model never exists as a second full copy. A pass may be repeated: a server that failed gets everything again.

vLLM silently accepts a subset of its tensors, skips layers of an adapter that it does not know, and puts a matrix that
is too small into a corner. So both ends check names and shapes before anything is received.

Tensors are sent in packed buffers. Trainer and workers split the same list of tensors by the same rule, so no header
is sent: tensors are appended until a buffer exceeds `chunk_bytes`. Layout of a buffer: the bytes of its tensors, zeros
up to a multiple of 8, and a checksum of 8 bytes, which is not counted in `chunk_bytes`.

A broadcast can end without an error and leave zeros, or what an earlier update left in the memory; only the content can
tell. The checksum is an exact sum over the payload as 8-byte words plus a mark of (pass, buffer). Integer addition
wraps and does not depend on the order, so a CPU and a GPU get the same number. All work stays on the buffer's device.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.manifest import DERIVED_SUFFIXES, ServerModel, Shape
from pipelinerl.world.jobs import ALLOCATOR_KEYS

DEFAULT_CHUNK_BYTES = 256 * 2**20
CHECKSUM_BYTES = 8
FLOAT16_MAX = 65504.0
_WORD_BYTES = 8
#: Words that share a factor in the sum; blocks have different ones, so that exchanged blocks are found as well.
BLOCK_WORDS = 4096
_INDEX_STEP = 2**40
#: Tensors of one of these are concatenated as they are; others as bytes, which takes longer.
_JOINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Ends of an adapter's names: A of shape [rank, in] and B of shape [out, rank], with the scale alpha / r in B.
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
_TIED_HEAD = "lm_head.weight"
_MOST_NAMED = 4

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype and shape of one tensor, in the names of the Hugging Face checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class WeightSource:
    """The weights of one version. A model that is sharded over the trainer's ranks is gathered by all of them together:
    rank 0 passes the source to the publisher and calls `done` afterwards, and every other rank calls `follow`.

    Args:
        metas: every tensor of an update, in the order of `gather`.
        gather: one new pass over the tensors, some at once; ranks that only take part get empty buckets.
        announce: broadcasts a flag from rank 0 to all ranks and returns it; None: this rank has the whole model.
    """

    def __init__(
        self,
        metas: list[TensorMeta],
        gather: Callable[[], Iterable[NamedTensors]],
        announce: Callable[[bool], bool] | None = None,
    ) -> None:
        self._metas = metas
        self.gather = gather
        self.announce = announce

    def metadata(self) -> list[TensorMeta]:
        """Every tensor of an update, without gathering."""
        return self._metas

    def buckets(self) -> Iterator[NamedTensors]:
        """One new pass. It is always read to its end."""
        if self.announce is not None:
            self.announce(True)
        yield from self.gather()

    def done(self) -> None:
        """Rank 0: no further pass follows in this round. Call it whatever happened to the update."""
        if self.announce is not None:
            self.announce(False)

    def follow(self) -> None:
        """Other ranks: take part in every pass of one round."""
        while self.announce is not None and self.announce(False):
            for _ in self.gather():
                pass


class ModuleSource(WeightSource):
    """The weights of a plain `torch.nn.Module` in Hugging Face names, and the buffers that its checkpoint has.

    Args:
        module: a model whose parameter names are those of its checkpoint.
        dtype: dtype of parameters on the wire; None keeps each one's own, as buffers always do.
        rename: maps a name to the checkpoint's; returning None leaves it out (a tied head, an adapter).
        value_of: gives what is sent for a parameter of this name (merged weights), one tensor at a time; None: itself.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype | None = None,
        rename: Callable[[str], str | None] = lambda name: name,
        value_of: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    ) -> None:
        sent: list[tuple[TensorMeta, str, torch.Tensor]] = []
        # `named_parameters` reports a shared parameter once, so a tied head is not sent twice.
        for name, tensor in (*module.named_parameters(), *saved_buffers(module)):
            if (wire_name := rename(name)) is not None:
                wire_dtype = dtype if dtype is not None and isinstance(tensor, torch.nn.Parameter) else tensor.dtype
                sent.append((TensorMeta(wire_name, wire_dtype, tuple(tensor.shape)), name, tensor))

        def gather() -> Iterator[NamedTensors]:
            for meta, name, tensor in sent:
                yield [(meta.name, value_of(name, tensor).detach().to(meta.dtype))]

        super().__init__([meta for meta, _, _ in sent], gather)


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of `module` that are part of its checkpoint, such as the bias by which a router balances experts.

    Left out are those that loaders compute although checkpoints may have them.
    """
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            is_saved = name.rpartition(".")[2] not in owner._non_persistent_buffers_set
            if is_saved and not name.endswith(DERIVED_SUFFIXES):
                yield name, buffer


def update_problems(
    model: ServerModel, sent: Mapping[str, Shape], dtypes: Sequence[str] = (), base_checksum: str | None = None
) -> list[str]:
    """Everything that is wrong with sending `sent` to a server with `model`, as short sentences.

    Args:
        model: of the server.
        sent: names and shapes of the update.
        dtypes: dtypes on the wire; compared for adapters, whose base model the server loaded itself.
        base_checksum: the trainer's, for adapters; None: not compared.
    """
    if model.adapter_rank is None:
        return [] if model.tensors is None else coverage_problems(model.tensors, sent, model.tied)
    problems = adapter_problems(model.tensors, sent, model.adapter_rank)
    if others := [dtype for dtype in dtypes if dtype != model.dtype]:
        problems.append(
            f"its base model is in {model.dtype}, the trainer computes with values of {', '.join(others)}: set "
            f"vllm_config.vllm_kwargs.dtype={others[0]}, or finetune.lora.sync=merged"
        )
    if None not in (base_checksum, model.base_checksum) and base_checksum != model.base_checksum:
        problems.append(
            "its model folder has other weights than the trainer read: model_path must not change during a run, on any "
            "machine; or set finetune.lora.sync=merged"
        )
    return problems


def coverage_problems(expected: Mapping[str, Shape], sent: Mapping[str, Shape], tied: bool) -> list[str]:
    """What is wrong with sending the whole model `sent` to a server that expects `expected`.

    `tied`: the output head is the embedding and need not be sent.
    """
    optional = {name for name in expected if name.endswith(DERIVED_SUFFIXES)}
    if tied:
        optional |= {_TIED_HEAD}
    problems = []
    if missing := sorted(set(expected) - set(sent) - optional):
        problems.append(f"{len(missing)} tensors are left out: {some(missing)}")
    if unknown := sorted(set(sent) - set(expected) - optional):
        problems.append(f"{len(unknown)} tensors are unknown to the model: {some(unknown)}")
    wrong = sorted(name for name in set(sent) & set(expected) if tuple(sent[name]) != tuple(expected[name]))
    problems += [f"{name}: got shape {list(sent[name])}, the model has {list(expected[name])}" for name in wrong]
    return _first_few(problems, _MOST_NAMED + 2)


def adapter_problems(model: Mapping[str, Shape] | None, sent: Mapping[str, Shape], largest_rank: int) -> list[str]:
    """What is wrong with sending the adapter `sent` to a server with `model` (None: not known)."""
    foreign = sorted(name for name in sent if not name.endswith((A_SUFFIX, B_SUFFIX)))
    layers = sorted({name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in sent} - set(foreign))
    problems = [f"{name} is not part of an adapter" for name in foreign]
    problems += [problem for layer in layers if (problem := _layer_problem(layer, model, sent, largest_rank))]
    if not sent:
        problems.append("it has no tensors")
    return _first_few(problems, _MOST_NAMED)


def _layer_problem(
    layer: str, model: Mapping[str, Shape] | None, sent: Mapping[str, Shape], largest_rank: int
) -> str | None:
    a, b = sent.get(f"{layer}{A_SUFFIX}"), sent.get(f"{layer}{B_SUFFIX}")
    if a is None or b is None:
        return f"{layer} has only one of A and B"
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return f"{layer}: got shapes {list(a)} and {list(b)}, expected [rank, in] and [out, rank]"
    if a[0] > largest_rank:
        return f"{layer}: got rank {a[0]}, the server has room for {largest_rank}"
    if model is None:
        return None
    matrix = model.get(f"{layer}.weight")
    if matrix is None:
        return f"{layer} is unknown to the model"
    if tuple(matrix) != (b[0], a[1]):
        return f"{layer}: B A has shape {[b[0], a[1]]}, the model's matrix has {list(matrix)}"
    return None


def _first_few(problems: list[str], limit: int) -> list[str]:
    return problems if len(problems) <= limit else [*problems[:limit], f"and {len(problems) - limit} more"]


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first of `names`, for a message."""
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


class DamagedBufferError(RuntimeError):
    """A buffer arrived without an error, but it is not what the trainer packed."""


def update_info_of(metas: Sequence[TensorMeta], chunk_bytes: int, pass_id: int) -> dict[str, Any]:
    """What a worker is told about one pass, as JSON values; `metas_of` reads `tensors`."""
    tensors = [(meta.name, meta.dtype_name, meta.shape) for meta in metas]
    return {"tensors": tensors, "chunk_bytes": chunk_bytes, "pass_id": pass_id}


def metas_of(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorMeta]:
    """Tensor descriptions of an update request: (name, dtype, shape). ValueError: a dtype is unknown."""
    metas = []
    for name, dtype_name, shape in tensors:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"update: {name}: got dtype {dtype_name!r}, expected the name of a torch dtype")
        metas.append(TensorMeta(name, dtype, tuple(shape)))
    return metas


def plan_chunks(metas: Iterable[TensorMeta], chunk_bytes: int) -> Iterator[list[TensorMeta]]:
    """Split `metas` into the buffers that they are sent in, in order."""
    chunk: list[TensorMeta] = []
    total = 0
    for meta in metas:
        chunk.append(meta)
        total += meta.num_bytes
        if total > chunk_bytes:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def payload_bytes(metas: Iterable[TensorMeta]) -> int:
    """Bytes of the tensors of one buffer."""
    return sum(meta.num_bytes for meta in metas)


def packed_bytes(metas: Iterable[TensorMeta]) -> int:
    """Size of the buffer that `pack` makes of these tensors."""
    return _padded(payload_bytes(metas)) + CHECKSUM_BYTES


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD_BYTES) * _WORD_BYTES


def mark_of(pass_id: int, index: int, payload: int) -> int:
    """What the checksum of a buffer adds to the sum, as a signed 64-bit number. Odd, so all zeros never pass.

    Args:
        pass_id: random number below 2**63, another one for every pass over the weights.
        index: number of the buffer in its pass, from 0.
        payload: its bytes without padding and checksum.
    """
    mark = (2 * (pass_id + index * _INDEX_STEP + payload) + 1) % 2**64
    return mark - 2**64 if mark >= 2**63 else mark


def checksum(words: torch.Tensor) -> torch.Tensor:
    """Sum of `words` (int64, one dimension) modulo 2**64, each times the factor of its block: 1, 3, 5, ... A scalar.

    The factors are odd, so that any change of one word changes the sum.
    """
    whole = words.numel() // BLOCK_WORDS
    blocks = words[: whole * BLOCK_WORDS].view(whole, BLOCK_WORDS).sum(dim=1)
    factors = torch.arange(whole, device=words.device) * 2 + 1
    return (blocks * factors).sum() + words[whole * BLOCK_WORDS :].sum() * (2 * whole + 1)


def checksum_problem(buffer: torch.Tensor, num_bytes: int, mark: int) -> str | None:
    """Why `buffer` is not what was packed with `mark`; None if it is. Waits for the device once.

    Args:
        buffer: uint8, on any device.
        num_bytes: size that it should have, padding and checksum included.
    """
    if buffer.numel() != num_bytes:
        return f"{buffer.numel()} bytes, expected {num_bytes}"
    words = buffer.view(torch.int64)
    got, received = torch.stack((checksum(words[:-1]), words[-1])).tolist()
    # The sum that the sender had, if this checksum is of this buffer and pass.
    expected = (received - mark + 2**63) % 2**64 - 2**63
    if got == expected:
        return None
    zeros = " (all zeros)" if got == received == 0 and not bool(buffer.any()) else ""
    return f"checksum {got}, expected {expected}{zeros}"


@contextmanager
def exportable_memory(device: torch.device) -> Iterator[None]:
    """Within it, tensors that any thread makes on a GPU can be opened by other processes of the user.

    The handle of an expandable segment is a file descriptor, and containers forbid taking one from another process.
    """
    settings = next((os.environ[key] for key in ALLOCATOR_KEYS if key in os.environ), "")
    fixed = re.sub(r"(expandable_segments\s*:)\s*True", r"\1False", settings)
    if fixed == settings or device.type != "cuda":
        yield
        return
    torch._C._accelerator_setAllocatorSettings(fixed)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def pack(tensors: Sequence[torch.Tensor], mark: int) -> torch.Tensor:
    """One uint8 buffer with the bytes of `tensors`, in order, and their checksum. Does not wait for the device.

    Args:
        tensors: at least one; all on one device, which is that of the buffer. Strided ones are made contiguous.
        mark: that of the buffer in its pass (`mark_of`).
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    first = flat[0].dtype
    if first not in _JOINED_DTYPES or any(part.dtype != first for part in flat):
        flat = [part.contiguous().view(torch.uint8) for part in flat]
    payload = sum(part.numel() for part in flat) * flat[0].element_size()
    device = flat[0].device
    with exportable_memory(device):
        buffer = torch.empty(_padded(payload) + CHECKSUM_BYTES, dtype=torch.uint8, device=device)
    torch.cat(flat, out=buffer[:payload].view(flat[0].dtype))
    buffer[payload:-CHECKSUM_BYTES].zero_()
    words = buffer.view(torch.int64)
    words[-1:].copy_(checksum(words[:-1]) + mark)
    return buffer


def unpack(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> NamedTensors:
    """The tensors in `buffer`, as views where alignment allows it."""
    tensors: NamedTensors = []
    offset = 0
    for meta in metas:
        part = buffer[offset : offset + meta.num_bytes]
        if offset % meta.dtype.itemsize:
            part = part.clone()
        tensors.append((meta.name, part.view(meta.dtype).view(meta.shape)))
        offset += meta.num_bytes
    return tensors


def packed_buffers(
    source: WeightSource,
    metas: list[TensorMeta],
    chunk_bytes: int,
    pass_id: int,
    float16_servers: Sequence[str] = (),
) -> Iterator[torch.Tensor]:
    """One pass over `source` as packed buffers, split as `plan_chunks` does. The trainer's side.

    A buffer is complete when it is yielded: the threads that send it use other streams.

    Args:
        pass_id: number of this pass, part of the checksums.
        float16_servers: servers that hold their weights in float16, where values beyond its range become infinite.

    Raises:
        ValueError: the pass yields something else than `metas` declare.
        WeightSyncError: a value does not fit into float16 and there are servers in it.
    """
    chunk: NamedTensors = []
    index = total = 0
    expected = iter(metas)
    buckets = source.buckets()

    def packed() -> torch.Tensor:
        if float16_servers and (problem := _beyond_float16(chunk)):
            # The pass may be a collective of all ranks: they wait for its end.
            for _ in buckets:
                pass
            raise WeightSyncError(
                ", ".join(float16_servers),
                f"{problem}, and a server in float16 holds at most {FLOAT16_MAX:g}: "
                "use vllm_config.vllm_kwargs.dtype=bfloat16 for this model",
            )
        buffer = pack([part for _, part in chunk], mark_of(pass_id, index, total))
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        return buffer

    for bucket in buckets:
        for name, tensor in bucket:
            meta = next(expected, None)
            if meta is None or (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, meta.shape):
                raise ValueError(f"weight source: got {name} {tensor.dtype} {list(tensor.shape)}, expected {meta}")
            chunk.append((name, tensor))
            total += meta.num_bytes
            if total > chunk_bytes:
                yield packed()
                chunk, index, total = [], index + 1, 0
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"weight source: the pass ended before {missing.name}")
    if chunk:
        yield packed()


def _beyond_float16(chunk: NamedTensors) -> str | None:
    """What float16 cannot hold, or was made infinite by a cast; None if all values fit. One wait for the GPU."""
    filled = [(name, tensor.detach()) for name, tensor in chunk if tensor.numel() and tensor.is_floating_point()]
    if not filled:
        return None
    largest = torch.stack([torch.linalg.vector_norm(tensor, float("inf")).float() for _, tensor in filled]).tolist()
    for (name, _), value in zip(filled, largest, strict=True):
        # Written so that NaN is refused.
        if not value <= FLOAT16_MAX:
            return f"{name} has a value of {value:g}" if value != float("inf") else f"{name} has values that overflow"
    return None


def receive_buffers(
    metas: Sequence[TensorMeta],
    chunk_bytes: int,
    pass_id: int,
    receive: Callable[[int], torch.Tensor],
    load: Callable[[NamedTensors], object],
) -> None:
    """Receive, check and load all buffers of a pass, in order. The server's side.

    After a damaged buffer, or one that could not be loaded, nothing more is loaded, but the rest is still received:
    the other workers and the trainer are in the same broadcasts and would wait there until their timeout.

    Args:
        metas: all tensors of the pass, as the trainer announced them.
        receive: returns the next buffer, given its size in bytes; complete, not under way.
        load: gets the tensors of a buffer; returns when they were copied, or keeps them.

    Raises:
        DamagedBufferError: the first buffer that is not what was packed; the update must not be finished.
        RuntimeError: `receive` failed.
        Exception: the first one of `load`, after all buffers were received.
    """
    chunks = list(plan_chunks(metas, chunk_bytes))
    first_error: Exception | None = None
    for index, chunk in enumerate(chunks):
        try:
            buffer = receive(packed_bytes(chunk))
        except RuntimeError as error:
            if first_error is not None:
                raise first_error from error
            raise
        if first_error is None:
            try:
                mark = mark_of(pass_id, index, payload_bytes(chunk))
                if problem := checksum_problem(buffer, packed_bytes(chunk), mark):
                    which = f"buffer {index + 1} of {len(chunks)}"
                    raise DamagedBufferError(f"{which} arrived damaged: {problem}; nothing more was loaded")
                load(unpack(buffer, chunk))
            except Exception as error:  # noqa: BLE001 - raised below, whatever it is
                first_error = error
        # Before memory for the next one is allocated.
        del buffer
    if first_error is not None:
        raise first_error
