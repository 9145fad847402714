"""A server's side of one pass over the weights: every packed buffer is checked before it is loaded.

Called by the transfer engines of `inference/`, which say how a buffer is fetched and loaded. Waits for whatever `fetch`
waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipelinerl.weights.layout import BufferLayout, UpdateLayout
from pipelinerl.weights.seal import mark_of, seal_problem


class DamagedBufferError(RuntimeError):
    """A buffer arrived without an error, but it is not what the trainer packed."""


def receive_buffers(
    transport: str,
    layout: UpdateLayout,
    pass_id: int,
    fetch: Callable[[int], torch.Tensor],
    load: Callable[[BufferLayout, torch.Tensor], object],
    start: Callable[[int], object] | None = None,
) -> None:
    """Fetch, check and load all buffers of a pass, in order.

    After a damaged buffer, or one that could not be loaded, nothing is loaded any more, but the rest is still fetched:
    the other workers and the trainer are in the same broadcasts and would wait there until their time-out.

    Args:
        transport: its name, for the message.
        layout: of all tensors of the pass, as the trainer announced them.
        pass_id: the trainer's number of this pass.
        fetch: returns the next buffer, given its size in bytes; complete, not under way.
        load: takes a buffer and what lies where in it; returns when its tensors were copied or are kept.
        start: if given, it is called with the size of the next buffer before one that has come is checked and loaded:
            the next is on its way meanwhile, and `fetch` then waits for it.

    Raises:
        DamagedBufferError: the first buffer that is not what was packed; the update must not be finished.
        RuntimeError: `fetch` or `start` failed.
        Exception: the first one of `load`, after all buffers came.
    """
    first_error: Exception | None = None
    following = iter(layout.buffers[1:])
    for part in layout.buffers:
        try:
            buffer = fetch(part.num_bytes)
            if start is not None and (after := next(following, None)) is not None:
                start(after.num_bytes)
        except RuntimeError as error:
            if first_error is not None:
                raise first_error from error
            raise
        if first_error is None:
            problem = seal_problem(buffer, part.num_bytes, mark_of(pass_id, part.index, part.payload_bytes))
            if problem is None:
                try:
                    load(part, buffer)
                except Exception as error:  # noqa: BLE001 - raised below, whatever it is
                    first_error = error
            else:
                which = f"{transport}: buffer {part.index + 1} of {len(layout.buffers)}"
                text = f"{which} arrived damaged: {problem}; nothing of it or after it was loaded"
                first_error = DamagedBufferError(text)
        # Before memory for the next one is taken.
        del buffer
    if first_error is not None:
        raise first_error
