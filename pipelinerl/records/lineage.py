"""Which steps count: all of the newest incarnation, and those of older ones up to where a newer one resumed.

A run that resumes from the checkpoint of step k repeats step k+1 under a higher incarnation; what the older
incarnation did after step k is rolled back.
"""

from __future__ import annotations

from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted


class Lineage:
    """Steps per incarnation. Order of arrival does not matter."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], int] = {}
        self._first_step: dict[int, int] = {}
        self._last_step: int | None = None

    def add(self, message: TrainerMessage) -> None:
        """Record the step that a message of the trainer reports, if any."""
        if isinstance(message, TrainerStarted):
            self.start(message.incarnation, message.step)
        elif isinstance(message, StepDone):
            self.add_step(message.incarnation, message.step, message.num_samples)

    def add_step(self, incarnation: int, step: int, num_samples: int) -> None:
        """`step` (from 1) was done by `incarnation` on `num_samples` samples."""
        self._last_step = None
        self._samples[incarnation, step] = num_samples
        self._first_step[incarnation] = min(step, self._first_step.get(incarnation, step))

    def start(self, incarnation: int, step: int) -> None:
        """`incarnation` continues from `step`; later steps of older ones no longer count."""
        self._last_step = None
        self._first_step[incarnation] = min(step + 1, self._first_step.get(incarnation, step + 1))

    def survives(self, incarnation: int, step: int) -> bool:
        """False if a newer incarnation resumed from an earlier step."""
        return all(step < first for newer, first in self._first_step.items() if newer > incarnation)

    def incarnation_of(self, step: int) -> int:
        """The incarnation whose `step` counts; 0 if none reported it."""
        return max((inc for inc, done in self._samples if done == step and self.survives(inc, step)), default=0)

    @property
    def last_step(self) -> int:
        """Number of optimizer steps that led to the weights; 0 before the first."""
        if self._last_step is None:
            steps = (step for incarnation, step in self._samples if self.survives(incarnation, step))
            self._last_step = max(steps, default=0)
        return self._last_step

    @property
    def num_samples(self) -> int:
        """Samples trained by the steps that survive."""
        return sum(count for (incarnation, step), count in self._samples.items() if self.survives(incarnation, step))
