"""Hears from the preprocessor that no more batches come because the passes over the problems are over.

Called by `assemble` for rank 0, which asks while it waits for data. Waits for nothing: a thread follows the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from pipelinerl.records import PassesOver
from pipelinerl.role import RoleContext
from pipelinerl.streams.base import PASSES_TOPIC, Entry
from pipelinerl.streams.feed import Feed


def follow_passes(
    context: RoleContext, preprocessor: str, stack: ExitStack, wake: Callable[[], None]
) -> Callable[[int], bool]:
    """Follow the stream `passes` in a thread that `stack` ends.

    Args:
        context: of the trainer's rank 0.
        preprocessor: name of the job that writes the stream.
        stack: ends the thread.
        wake: called when something was heard.

    Returns:
        Whether no batch follows that of the given step. It raises what the thread died of.
    """
    max_epochs = context.config.finetune.max_epochs
    if max_epochs is None or not context.world.jobs_of("preprocessor"):
        return lambda step: False
    ends: set[int] = set()

    def listen(entry: Entry[PassesOver]) -> None:
        # What a start with fewer passes wrote says nothing about this one.
        if entry.record.max_epochs >= max_epochs:
            ends.add(entry.record.step)
            wake()

    reader = context.streams.reader(PASSES_TOPIC, preprocessor, PassesOver)
    feed = Feed(reader, listen, "passes", lambda _: wake()).start()
    stack.callback(feed.stop)

    def is_over(step: int) -> bool:
        feed.raise_if_failed()
        return step in ends

    return is_over
