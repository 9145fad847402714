"""A server's side of one pass over the weights: every packed buffer is checked before it is loaded.

Called by the transfer engines of `inference/`, which say how a buffer is fetched and loaded. Waits for whatever `fetch`
waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipelinerl.weights.packing import TensorMeta, packed_bytes, payload_bytes, plan_chunks, unpack
from pipelinerl.weights.seal import mark_of, seal_problem


class DamagedBufferError(RuntimeError):
    """A buffer arrived without an error, but it is not what the trainer packed."""


def receive_buffers(
    transport: str,
    metas: Sequence[TensorMeta],
    chunk_bytes: int,
    pass_id: int,
    fetch: Callable[[int], torch.Tensor],
    load: Callable[[list[tuple[str, torch.Tensor]]], object],
) -> None:
    """Fetch, check and load all buffers of a pass, in order.

    After a damaged buffer nothing is loaded any more, but the rest is still fetched: the other workers and the trainer
    are in the same broadcasts and would wait there until their time-out.

    Args:
        transport: its name, for the message.
        metas: all tensors of the pass, as the trainer announced them.
        chunk_bytes: the size by which both ends split them.
        pass_id: the trainer's number of this pass.
        fetch: returns the next buffer, given its size in bytes; complete, not under way.
        load: takes named tensors, which are views of the buffer; returns when they were copied or are kept.

    Raises:
        DamagedBufferError: the first buffer that is not what was packed; the update must not be finished.
        RuntimeError: `fetch` failed.
    """
    chunks = list(plan_chunks(metas, chunk_bytes))
    damage = ""
    for index, chunk in enumerate(chunks):
        num_bytes = packed_bytes(chunk)
        try:
            buffer = fetch(num_bytes)
        except RuntimeError as error:
            if damage:
                raise DamagedBufferError(damage) from error
            raise
        if damage:
            continue
        problem = seal_problem(buffer, num_bytes, mark_of(pass_id, index, payload_bytes(chunk)))
        if problem is None:
            load(unpack(buffer, chunk))
        else:
            which = f"{transport}: buffer {index + 1} of {len(chunks)}"
            damage = f"{which} arrived damaged: {problem}; nothing of it or after it was loaded"
        # Before memory for the next one is taken.
        del buffer
    if damage:
        raise DamagedBufferError(damage)
