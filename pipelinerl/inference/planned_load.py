"""How the packed buffers of an update get into a model in place: by vLLM's loaders, or by the copies that they made.

Called by `inference.reload`. vLLM passes every tensor of every update through Python; which bytes go where is always
the same. So one update is recorded while it is loaded as usual, the next is made both ways and compared, and from the
third on only the copies are made. Whatever is not certain is loaded as usual:

| update | how it is loaded | then |
|---|---|---|
| first of its layout, or after the model's memory moved | as usual, watched | plan, or a reason against one |
| second | each buffer copied, then as usual; compared at the end | proven, or no plan any more |
| later | copied | |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from pipelinerl.inference.copy_plan import (
    CopyRecorder,
    ModelMemory,
    Step,
    uncovered_parameters,
)
from pipelinerl.inference.copying import BufferCopies
from pipelinerl.inference.proof import Proof
from pipelinerl.weights.layout import BufferLayout, UpdateLayout

#: `0` in a server's environment: every update goes through vLLM's loaders.
COPY_PLAN_VARIABLE = "PIPELINERL_COPY_PLAN"

# Below the name of vLLM, whose configuration of logging is the one that the workers have.
logger = logging.getLogger(f"vllm.{__name__}")


class Mode(Enum):
    """How the present update is loaded."""

    USUAL = "usual"
    RECORD = "record"
    PROVE = "prove"
    COPY = "copy"


class PlannedLoader:
    """Loads one update after another into one model.

    Call `begin`, then `load` for every buffer, then `finish`; without `finish` the update counts for nothing.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.mode = Mode.USUAL
        self._is_off = environ.get(COPY_PLAN_VARIABLE) == "0"
        self._refused_layout: UpdateLayout | None = None
        self._layout: UpdateLayout | None = None
        self._memory: ModelMemory | None = None
        self._steps: dict[int, list[Step]] = {}
        self._copies: dict[int, BufferCopies] = {}
        self._proof: Proof | None = None
        self._is_proven = False

    def begin(self, model: torch.nn.Module, layout: UpdateLayout) -> None:
        """An update of this layout is about to be loaded into `model`."""
        self.mode = Mode.USUAL
        if self._is_off or layout is self._refused_layout:
            return
        memory = self._memory
        known = memory is not None and memory.model is model and layout is self._layout and bool(self._copies)
        if memory is None or not known or not memory.is_unmoved():
            if known:
                logger.info("weights: the model's memory moved, the copies are recorded anew")
            self._forget()
            self._layout, self._memory = layout, ModelMemory(model)
            self.mode = Mode.RECORD
        elif self._is_proven:
            self.mode = Mode.COPY
        else:
            self._begin_proof(memory)

    def load(self, model: Any, part: BufferLayout, buffer: torch.Tensor) -> None:
        """Put the tensors of `buffer` in place; returns when that is done or queued on the current stream."""
        if self.mode is Mode.RECORD:
            self._record(model, part, buffer)
        elif self.mode in (Mode.PROVE, Mode.COPY):
            self._copy(model, part, buffer)
        else:
            model.load_weights(part.unpack(buffer))

    def finish(self) -> None:
        """All buffers of the update were loaded."""
        if self.mode is Mode.RECORD:
            self._make_plan()
        elif self.mode is Mode.PROVE:
            self._end_proof()
        self.mode = Mode.USUAL

    def _record(self, model: Any, part: BufferLayout, buffer: torch.Tensor) -> None:
        assert self._memory is not None
        tensors = part.unpack(buffer)
        recorder = CopyRecorder(self._memory, part, [tensor for _, tensor in tensors])
        with recorder:
            model.load_weights(tensors)
        if recorder.refusal is None:
            self._steps[part.index] = recorder.steps
        else:
            self._refuse(f"a loader cannot be replayed: {recorder.refusal}")

    def _make_plan(self) -> None:
        assert self._memory is not None and self._layout is not None
        every_step = [step for steps in self._steps.values() for step in steps]
        if not self._memory.is_unmoved():
            self._refuse("loading gave the model other tensors")
        elif missing := uncovered_parameters(self._memory, every_step):
            self._refuse(f"{len(missing)} parameters are not filled by copies alone: {', '.join(missing[:4])}")
        else:
            self._copies = {part.index: BufferCopies(part, self._steps[part.index]) for part in self._layout.buffers}
        self._steps = {}

    def _begin_proof(self, memory: ModelMemory) -> None:
        try:
            # A new one for every update: of one that was cut short nothing is left.
            self._proof = Proof(memory, self._copies)
            self.mode = Mode.PROVE
        except RuntimeError:
            logger.exception("weights: the copies cannot be compared with the loaders; updates are loaded as usual")
            self._switch_off()

    def _end_proof(self) -> None:
        """Every buffer was copied and then loaded: the model holds what the loaders gave, whatever comes out here."""
        assert self._proof is not None
        try:
            differences = self._proof.differences()
        except RuntimeError:
            logger.exception("weights: the copies could not be compared with the loaders; updates are loaded as usual")
            self._switch_off()
            return
        if differences:
            which = ", ".join(differences[:4])
            logger.error("weights: copies of %s gave other weights than the loaders; not used", which)
            self._switch_off()
            return
        self._proof, self._is_proven = None, True
        copies = sum(len(part.steps) for part in self._copies.values())
        logger.info("weights: %d copies do what the loaders do; updates are copied from now on", copies)

    def _copy(self, model: Any, part: BufferLayout, buffer: torch.Tensor) -> None:
        try:
            if self.mode is Mode.COPY:
                self._copies[part.index].make(buffer)
                return
            assert self._proof is not None
            self._proof.copy(part.index, buffer)
        except RuntimeError:
            logger.exception("weights: the copies of buffer %d failed; updates are loaded as usual", part.index + 1)
            self._switch_off()
        model.load_weights(part.unpack(buffer))

    def _refuse(self, reason: str) -> None:
        """No plan for updates of this layout."""
        logger.warning("weights: every update is loaded tensor by tensor: %s", reason)
        self._refused_layout = self._layout
        self._forget()

    def _switch_off(self) -> None:
        self._is_off = True
        self._forget()

    def _forget(self) -> None:
        self.mode = Mode.USUAL
        self._layout, self._memory = None, None
        self._steps, self._copies = {}, {}
        self._proof, self._is_proven = None, False
