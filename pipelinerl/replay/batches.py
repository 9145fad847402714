"""The preprocessor's part of a replay: recorded groups give the recorded batches again. No torch.

Called by `replay.run` for every batch. Which groups form a batch depends on when they came, so that is taken from the
record; filters, advantages, normalisation and the packing plan are computed again and compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.preprocess.intake import Intake
from pipelinerl.preprocess.recovery import ResumePoint
from pipelinerl.preprocess.scoring import finish_step
from pipelinerl.records import Group, Sample, ScoredSample, TrainingBatch
from pipelinerl.rl.packing import make_plan
from pipelinerl.streams.base import Entry


class BatchReplay:
    """Rebuilds batches one after the other. `groups` are read as far as they are needed and dropped when used.

    `finish_in_trainer`: the trainer finished the advantages (`RunConfig.finishes_advantages_in_trainer`).
    """

    def __init__(self, config: FinetuneConfig, groups: Iterator[Group], finish_in_trainer: bool = False) -> None:
        self._config = config
        self._finish_in_trainer = finish_in_trainer
        self._groups = groups
        self._read: dict[str, Group] = {}

    def difference(self, batch: TrainingBatch) -> str | None:
        """What the rebuilt batch differs in from the recorded one; None if in nothing."""
        recorded = {scored.sample.id: scored.sample for scored in batch.samples}
        rebuilt: list[ScoredSample] = []
        for group_id in batch.group_ids:
            group = self._find(group_id)
            if group is None:
                return f"group {group_id} is not in the stream actor"
            scored = self._score(group, recorded)
            rebuilt += [item for item in scored if item.sample.id in recorded]
        rebuilt = finish_step(rebuilt, self._config.rl, self._finish_in_trainer)
        if [item.sample.id for item in rebuilt] != list(recorded):
            return "other samples"
        for mine, theirs in zip(rebuilt, batch.samples, strict=True):
            if mine != theirs:
                what = "advantages" if mine.sample == theirs.sample else "sample"
                return f"{what} of {theirs.sample.id}"
        lengths = [len(item.sample.input_ids) for item in rebuilt]
        plan = make_plan(
            lengths,
            len(batch.plan),
            self._config.seq_length,
            self._config.seq_packing,
            self._config.train_batch_size,
        )
        return None if plan == batch.plan else "plan"

    def _find(self, group_id: str) -> Group | None:
        while group_id not in self._read:
            group = next(self._groups, None)
            if group is None:
                return None
            self._read[group.id] = group
        return self._read.pop(group_id)

    def _score(self, group: Group, recorded: dict[str, Sample]) -> list[ScoredSample]:
        # Log-probs of the reference model were added between the two streams.
        samples = [_with_reference(sample, recorded.get(sample.id)) for sample in group.samples]
        whole = msgspec.structs.replace(group, samples=samples)
        ((ready, _),) = Intake(self._config, ResumePoint()).digest([Entry(0, whole)])
        return list(ready.samples)


def _with_reference(sample: Sample, recorded: Sample | None) -> Sample:
    return sample if recorded is None else msgspec.structs.replace(sample, ref_logprobs=recorded.ref_logprobs)
