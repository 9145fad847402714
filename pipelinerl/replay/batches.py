"""The preprocessor's part of a replay: recorded groups give the recorded batches again. No torch.

Which groups form a batch depends on when they came, so that is taken from the record; filters, advantages and the
packing plan are computed again and compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.preprocess.recovery import ResumePoint
from pipelinerl.preprocess.scoring import GroupScorer
from pipelinerl.records import Group, Sample, TrainingBatch
from pipelinerl.rl.packing import make_plan
from pipelinerl.streams.base import Entry


class BatchReplay:
    """Rebuilds batches one after the other. `groups` are read as far as they are needed and dropped when used."""

    def __init__(self, config: FinetuneConfig, groups: Iterator[Group]) -> None:
        self._config = config
        self._groups = groups
        self._read: dict[str, Group] = {}

    def difference(self, batch: TrainingBatch) -> str | None:
        """What the rebuilt batch differs in from the recorded one; None if in nothing."""
        recorded = {sample.id: sample for sample in batch.samples}
        rebuilt: list[Sample] = []
        for group_id in batch.group_ids:
            group = self._find(group_id)
            if group is None:
                return f"group {group_id} is not in the stream actor"
            rebuilt += [sample for sample in self._score(group, recorded) if sample.id in recorded]
        if [sample.id for sample in rebuilt] != list(recorded):
            return "other samples"
        for mine, theirs in zip(rebuilt, batch.samples, strict=True):
            if mine != theirs:
                same_sample = replace(mine, advantage=theirs.advantage) == theirs
                return f"{'advantage' if same_sample else 'sample'} of {theirs.id}"
        plan = make_plan(
            [len(sample.input_ids) for sample in rebuilt],
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

    def _score(self, group: Group, recorded: dict[str, Sample]) -> list[Sample]:
        # Log-probs of the reference model were added between the two streams.
        samples = [_with_reference(sample, recorded.get(sample.id)) for sample in group.samples]
        scorer = GroupScorer(self._config, ResumePoint())
        ((scored, _),) = scorer.score([Entry(0, replace(group, samples=samples))])
        return scored.record.samples


def _with_reference(sample: Sample, recorded: Sample | None) -> Sample:
    return sample if recorded is None else replace(sample, ref_logprobs=recorded.ref_logprobs)
