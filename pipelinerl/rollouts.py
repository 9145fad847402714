"""What `generate_rollout` returns: plain data that user code fills in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipelinerl.records import VersionSpan

#: Metadata key of samples whose reward is that of their own turn, for `finetune.rl.gamma`.
STEP_REWARD = "step_reward"

__all__ = ["BaseMetrics", "RolloutResult", "TrainingText"]


@dataclass(slots=True)
class TrainingText:
    """One trainable token sequence, usually made by `make_training_text` and then given a `reward`.

    `labels` repeats `input_ids` where a token is trained and is -100 elsewhere; `logprobs` has one value per trained
    token; `version_spans` cover the trained tokens. `n_predicted` counts the characters at the end of `text` that the
    model wrote. `reward` is what is trained on; a rollout with a text without one fails.

    A hand-made text may omit `version_spans` (see `RolloutResult.model_version`) and `temperature` (the handle's is
    used).
    """

    text: str = ""
    n_predicted: int = 0
    reward: float | None = None
    logprobs: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    group_id: str | None = None
    finished: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    version_spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    temperature: float | None = None

    @property
    def prompt_text(self) -> str:
        return self.text[: len(self.text) - self.n_predicted]

    @property
    def output_text(self) -> str:
        return self.text[len(self.text) - self.n_predicted :]


class BaseMetrics(BaseModel):
    """Numbers of one rollout. Subclass it to add your own: every number is averaged and reported."""

    model_config = ConfigDict(extra="allow")

    reward: float
    success: bool
    no_error: bool = True
    no_answer: bool = False


@dataclass(slots=True)
class RolloutResult:
    """Result of one attempt at one problem.

    `latency` is in seconds. Metrics are averaged per `dataset_name`. `model_version` is the policy version of texts
    without `version_spans`; None: the version that answered the rollout's requests, if it was only one. The actor fills
    in the remaining fields.
    """

    training_texts: list[TrainingText]
    metrics: BaseMetrics
    latency: float = 0.0
    model_version: int | None = None
    dataset_name: str | None = None
    group_id: str | None = None
    problem_id: str | int | None = None
    domain: str | None = None
