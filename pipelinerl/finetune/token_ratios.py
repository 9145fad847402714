"""Records the importance ratio of each trained token, by which the page of `view` colors tokens.

Every rank writes its own share after the step, so that nothing waits for it; a stream error ends the recording, not the
run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from pipelinerl.errors import StreamError
from pipelinerl.records import Sample, TokenRatios
from pipelinerl.records.sample import Array
from pipelinerl.rl.loss import LossInputs
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.streams.base import StreamWriter

logger = logging.getLogger(__name__)


class RatioRecorder:
    """Collects log pi - log mu of one step's trained tokens on this rank, two bytes each, and writes them.

    Args:
        writer: of this rank's stream; owned by the recorder.
    """

    def __init__(self, writer: StreamWriter[TokenRatios], incarnation: int) -> None:
        self._writer, self._incarnation = writer, incarnation
        self._parts: list[torch.Tensor] = []
        self._indices: list[int] = []
        self._works = True

    def add(self, batch: MicroBatch, inputs: LossInputs) -> None:
        """Take a micro-batch after its forward pass. Everything stays on its device; nothing is waited for."""
        if self._works:
            differences = (inputs.new_logprobs.detach() - inputs.old_logprobs).flatten()[batch.trained]
            self._parts.append(differences.half())
            self._indices += batch.indices

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Write what was added; `samples` are all of the step."""
        own, parts = [samples[index] for index in self._indices], self._parts
        self._parts, self._indices = [], []
        if not self._works:
            return
        values = torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.float16)
        record = TokenRatios(
            step=step,
            incarnation=self._incarnation,
            sample_ids=[sample.id for sample in own],
            lengths=[sample.num_trained_tokens for sample in own],
            log_ratios=Array("<f2", [len(values)], values.numpy().tobytes()),
        )
        try:
            self._writer.write(record)
        except StreamError as error:
            self._works = False
            logger.warning("importance ratios of tokens are no longer recorded: %s", error)

    def close(self) -> None:
        """Release the stream."""
        try:
            self._writer.close()
        except StreamError as error:
            logger.warning("importance ratios of tokens may be lost: %s", error)
