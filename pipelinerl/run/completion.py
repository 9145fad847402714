"""Is training complete? Answered from the trainer's stream, for the exit policy of the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.records import TrainerMessage, TrainingDone
from pipelinerl.streams.base import StreamReader


@dataclass
class TrainingCompletion:
    """Callable: whether the stream holds the `TrainingDone` of this incarnation. Reads on from where it stopped."""

    reader: StreamReader[TrainerMessage]
    incarnation: int
    _is_done: bool = False

    def __call__(self) -> bool:
        while not self._is_done:
            entries = self.reader.read(timeout_s=0)
            if not entries:
                break
            self._is_done = any(
                isinstance(entry.record, TrainingDone) and entry.record.incarnation == self.incarnation
                for entry in entries
            )
        return self._is_done
