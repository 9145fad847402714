"""What a rollout of an evaluation said, for people to read. Pure; called by the rollout worker.

Nothing of it is trained, so nothing is refused: greedy texts, texts without log-probs, rewards or ids are recorded as
they are, as far as a record can hold them.
"""

from __future__ import annotations

import math
from typing import Any

from pipelinerl.llm.plain_data import encodable, plain_metadata
from pipelinerl.records import EvaluationSample, VersionSpan
from pipelinerl.rollouts import TrainingText


def recorded_samples(
    texts: list[TrainingText], *, group_id: str, rollout_id: str, incarnation: int, reward: float
) -> list[EvaluationSample]:
    """Return the texts of one rollout with ids `{rollout_id}/s{k}`.

    Args:
        texts: as the rollout function returned them.
        reward: of the rollout, for texts without one.

    Raises:
        Exception: of any kind, if a field is not what its name says (ids that are no numbers, ...).
    """
    return [
        EvaluationSample(
            id=f"{rollout_id}/s{index}",
            group_id=group_id,
            rollout_id=rollout_id,
            input_ids=list(map(int, text.input_ids)),
            labels=list(map(int, text.labels)),
            reward=_finite(text.reward, _finite(reward, 0.0)),
            finished=bool(text.finished),
            finish_reason=str(text.finish_reason or ("stop" if text.finished else "length")),
            prompt_tokens=int(text.prompt_tokens),
            output_tokens=int(text.output_tokens),
            version_spans=[VersionSpan(*span) if isinstance(span, tuple) else span for span in text.version_spans],
            temperature=_finite(text.temperature, 1.0),
            incarnation=incarnation,
            metadata=plain_metadata(text.metadata),
            prompt_text="" if len(text.input_ids) else encodable(text.prompt_text),
            output_text="" if len(text.input_ids) else encodable(text.output_text),
        )
        for index, text in enumerate(texts)
    ]


def _finite(value: Any, otherwise: float) -> float:
    number = otherwise if value is None else float(value)
    return number if math.isfinite(number) else otherwise
