"""One pass over a weight source as the packed buffers that travel. Called by the publisher, in the trainer's thread.

A buffer is complete when it is given out: the threads that send it use streams of their own.
Values are checked on the way if a server computes in float16: whatever is beyond its range would become infinite there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.packing import TensorMeta, pack
from pipelinerl.weights.seal import mark_of
from pipelinerl.weights.source import WeightSource

FLOAT16_MAX = 65504.0


def packed_buffers(
    source: WeightSource,
    metas: list[TensorMeta],
    chunk_bytes: int,
    pass_id: int,
    float16_servers: Sequence[str] = (),
) -> Iterator[torch.Tensor]:
    """The tensors of one pass in sealed buffers, split as the workers split them (`packing.plan_chunks`).

    Args:
        pass_id: number of this pass, which the seals carry.
        float16_servers: servers that hold their weights in float16.

    Raises:
        ValueError: the pass yields something else than `metas` declare.
        WeightSyncError: a value does not fit into float16 and there are servers in it.
    """
    chunk: list[tuple[str, torch.Tensor]] = []
    index = total = 0
    expected = iter(metas)
    buckets = source.buckets()
    for bucket in buckets:
        for name, tensor in bucket:
            meta = next(expected, None)
            if meta is None or (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, meta.shape):
                raise ValueError(f"weight source: got {name} {tensor.dtype} {list(tensor.shape)}, expected {meta}")
            chunk.append((name, tensor))
            total += meta.num_bytes
            if total > chunk_bytes:
                _check_range(chunk, float16_servers, buckets)
                yield _complete(pack([part for _, part in chunk], mark_of(pass_id, index, total)))
                chunk, index, total = [], index + 1, 0
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"weight source: the pass ended before {missing.name}")
    if chunk:
        _check_range(chunk, float16_servers, buckets)
        yield _complete(pack([part for _, part in chunk], mark_of(pass_id, index, total)))


def _complete(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer`, once everything that this thread queued to fill it is done."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
    return buffer


def _check_range(chunk: list[tuple[str, torch.Tensor]], float16_servers: Sequence[str], rest: Iterator[object]) -> None:
    """WeightSyncError if there are servers in float16 and a value that they cannot hold."""
    if float16_servers and (problem := _beyond_float16(chunk)):
        # The pass may be a collective of all ranks: they wait for its end.
        for _ in rest:
            pass
        raise WeightSyncError(
            ", ".join(float16_servers),
            f"{problem}, and a server in float16 holds at most {FLOAT16_MAX:g}: "
            "use vllm_config.vllm_kwargs.dtype=bfloat16 for this model",
        )


def _beyond_float16(chunk: list[tuple[str, torch.Tensor]]) -> str | None:
    """What does not fit, or was made infinite on its way here; None if all is well. One wait for the GPU a chunk."""
    filled = [(name, tensor.detach()) for name, tensor in chunk if tensor.numel() and tensor.is_floating_point()]
    if not filled:
        return None
    largest = torch.stack([torch.linalg.vector_norm(tensor, float("inf")).float() for _, tensor in filled]).tolist()
    for (name, _), value in zip(filled, largest, strict=True):
        # NaN compares false. What is infinite may have become so when it was cast.
        if not value <= FLOAT16_MAX:
            return f"{name} has a value of {value:g}" if value != float("inf") else f"{name} has values that overflow"
    return None
