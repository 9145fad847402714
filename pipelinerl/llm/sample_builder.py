"""From answered requests to trainable samples: `make_training_text` for user code, `build_samples` for the wire.

`make_training_text` is called in rollouts; `build_samples` by the rollout worker when a rollout has ended. Pure.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from pipelinerl.errors import RolloutError
from pipelinerl.llm.answers import is_finished
from pipelinerl.llm.plain_data import plain_metadata
from pipelinerl.llm.trainable import TrainableLLM
from pipelinerl.llm.types import LLMCall
from pipelinerl.records import IGNORED_LABEL, Sample, VersionSpan

if TYPE_CHECKING:
    from pipelinerl.rollouts import TrainingText


def make_training_text(llm: TrainableLLM, llm_call: LLMCall) -> TrainingText:
    """Return the trainable text of one call: prompt ids, then output ids, of which the output is trained.

    The end token and the tokens of a stop string are part of the output and trained, as they were sampled; a token is
    masked by its place, never by its id. `finished` is true when the model ended the sequence itself.
    """
    from pipelinerl.rollouts import TrainingText

    prompt_ids, output_ids = llm_call.prompt_token_ids, llm_call.output_token_ids
    prompt_text = llm_call.prompt_text
    if prompt_text is None:
        prompt_text = llm.renderer.decode(prompt_ids, skip_special_tokens=False)
    return TrainingText(
        text=prompt_text + llm_call.output_text,
        n_predicted=len(llm_call.output_text),
        input_ids=[*prompt_ids, *output_ids],
        labels=[*([IGNORED_LABEL] * len(prompt_ids)), *output_ids],
        logprobs=list(llm_call.logprobs),
        finished=is_finished(llm_call.finish_reason),
        finish_reason=llm_call.finish_reason,
        prompt_tokens=len(prompt_ids),
        output_tokens=len(output_ids),
        version_spans=list(llm_call.version_spans),
        temperature=float(llm.parameters.get("temperature", 1.0)),
    )


def build_samples(
    texts: list[TrainingText],
    *,
    group_id: str,
    rollout_id: str,
    incarnation: int = 0,
    temperature: float | None = None,
) -> list[Sample]:
    """Turn a rollout's texts into wire samples with ids `{rollout_id}/s{k}`.

    Args:
        temperature: at which the trainer computes log-probs; texts of another one (greedy ones too) are refused. None:
            any is taken.

    Raises:
        RolloutError: a text cannot be trained on; its reason says why. The whole rollout is then failed.
    """
    samples = [
        _build_sample(text, f"{rollout_id}/s{index}", group_id, rollout_id, incarnation)
        for index, text in enumerate(texts)
    ]
    for sample in samples:
        if temperature is not None and sample.temperature != temperature:
            raise RolloutError(
                "other_temperature",
                f"sampled at temperature {sample.temperature:g}, trained at {temperature:g}: old and new log-probs "
                "would be of different policies. Leave llm.parameters['temperature'] as it is",
            )
    return samples


def _build_sample(text: TrainingText, sample_id: str, group_id: str, rollout_id: str, incarnation: int) -> Sample:
    trained = _check_lengths(text)
    spans = [VersionSpan(*span) if isinstance(span, tuple) else span for span in text.version_spans]
    _check_spans(spans, trained)
    return Sample(
        id=sample_id,
        group_id=group_id,
        rollout_id=rollout_id,
        input_ids=list(text.input_ids),
        labels=list(text.labels),
        logprobs=list(map(float, text.logprobs)),
        reward=_reward_of(text),
        finished=bool(text.finished),
        finish_reason=text.finish_reason or ("stop" if text.finished else "length"),
        prompt_tokens=text.prompt_tokens,
        output_tokens=text.output_tokens,
        version_spans=spans,
        temperature=1.0 if text.temperature is None else float(text.temperature),
        ref_logprobs=list(text.ref_logprobs),
        incarnation=incarnation,
        metadata=plain_metadata(text.metadata),
    )


def _reward_of(text: TrainingText) -> float:
    """Return the text's reward; one that was forgotten has its own message, or training on it would look like a task
    in which every attempt is worth the same."""
    if text.reward is None:
        raise RolloutError(
            "bad_reward",
            "the reward of a training text is None; set text.reward = ... to a number for each text that is returned "
            "(BaseMetrics.reward goes into the metrics, and nothing is trained on it)",
        )
    return checked_reward(text.reward)


def _check_lengths(text: TrainingText) -> int:
    """Return the number of trained tokens after checking that ids, labels and log-probs belong together."""
    if len(text.labels) != len(text.input_ids):
        raise RolloutError("length_mismatch", f"{len(text.labels)} labels for {len(text.input_ids)} ids")
    labels, ids = list(text.labels), list(text.input_ids)
    trained = len(labels) - labels.count(IGNORED_LABEL)
    # Compared in C: a loop in Python over every token is what a rollout would spend most of its time on.
    is_tail = labels[len(labels) - trained :] == ids[len(ids) - trained :]
    if not (is_tail or sum(map(operator.eq, ids, labels)) == trained) or IGNORED_LABEL in ids:
        pairs = zip(text.input_ids, text.labels, strict=True)
        token_id, label = next((t, label) for t, label in pairs if label not in (IGNORED_LABEL, t) or t < 0)
        raise RolloutError("bad_labels", f"label {label} at a place where the id is {token_id}")
    if trained == 0:
        raise RolloutError("no_trained_token", "every label is masked")
    if len(text.logprobs) != trained:
        raise RolloutError("length_mismatch", f"{len(text.logprobs)} log-probs for {trained} trained tokens")
    if text.labels[0] != IGNORED_LABEL:
        raise RolloutError("bad_labels", "the first token has nothing before it and cannot be trained")
    if not all(map(math.isfinite, text.logprobs)):
        raise RolloutError("bad_logprob", "a log-prob is not finite")
    if text.ref_logprobs and len(text.ref_logprobs) != trained:
        raise RolloutError("length_mismatch", f"{len(text.ref_logprobs)} reference log-probs for {trained} tokens")
    if not all(map(math.isfinite, text.ref_logprobs)):
        raise RolloutError("bad_logprob", "a reference log-prob is not finite")
    return trained


def _check_spans(spans: list[VersionSpan], trained: int) -> None:
    if not spans:
        raise RolloutError(
            "unversioned",
            "no version spans, and no request of this handle was answered; use make_training_text, or fill in "
            "version_spans or RolloutResult.model_version",
        )
    expected_start = 0
    for span in spans:
        if span.start != expected_start or span.end <= span.start:
            raise RolloutError("bad_version_spans", f"span [{span.start}, {span.end}) after {expected_start}")
        expected_start = span.end
    if expected_start != trained:
        raise RolloutError("bad_version_spans", f"spans cover {expected_start} of {trained} trained tokens")


def checked_reward(value: Any) -> float:
    """Return a reward as a float; 0.0 stays 0.0.

    Raises:
        RolloutError: `bad_reward` for None, NaN, infinities and anything that is not a number.
    """
    if not hasattr(value, "__float__") or isinstance(value, str):
        raise RolloutError("bad_reward", f"reward is {value!r}, expected a number")
    try:
        reward = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # an array or tensor of several numbers
        raise RolloutError("bad_reward", f"reward is {str(value)[:80]}, expected one number: {error}") from error
    if not math.isfinite(reward):
        raise RolloutError("bad_reward", f"reward is {reward}")
    return reward
