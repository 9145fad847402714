"""From answers to samples: growing token sequences, and the check of what a rollout function returned."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm.tokens import LLMCall
from pipelinerl.records import IGNORED_LABEL, EvaluationSample, RolloutSummary, Sample, VersionSpan
from pipelinerl.records.completion import are_logprobs, check_spans, is_finished
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

_LARGEST = (2 - 2**-23) * 2.0**127  # of fp32
_INT64_LIMIT = 1 << 63


@dataclass(slots=True)
class Turn:
    """Output tokens `[start, end)` of the sequence, the call that sampled them, and the turn's reward, if any."""

    start: int
    end: int
    call: LLMCall
    reward: float | None = None


@dataclass(slots=True)
class Transcript:
    """One growing sequence. `ids` are the last prompt and its answer; `text` is the same as text."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    turns: list[Turn] = field(default_factory=list)

    def add(self, call: LLMCall, text: str) -> None:
        """Add a call whose prompt begins with all ids so far.

        Raises:
            ValueError: the prompt does not begin with the ids so far.
        """
        known = len(self.ids)
        if call.prompt_token_ids[:known] != self.ids:
            raise ValueError(f"a prompt of {len(call.prompt_token_ids)} ids does not extend the {known} ids so far")
        start = len(call.prompt_token_ids)
        self.ids = [*call.prompt_token_ids, *call.output_token_ids]
        self.text = text
        self.turns.append(Turn(start=start, end=len(self.ids), call=call))

    def training_text(self, reward: float | None = None) -> TrainingText:
        """Return one sample in which exactly the sampled tokens of all turns are trained.

        Tokens are masked by position, never by id: sampled end tokens and stop strings are trained.
        """
        labels = [IGNORED_LABEL] * len(self.ids)
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        trained = 0
        for turn in self.turns:
            labels[turn.start : turn.end] = self.ids[turn.start : turn.end]
            logprobs.extend(turn.call.logprobs)
            _append_spans(spans, turn.call.version_spans, trained)
            trained += turn.end - turn.start
        last = self.turns[-1].call
        return TrainingText(
            text=self.text,
            n_predicted=min(len(last.output_text), len(self.text)),
            reward=reward,
            logprobs=logprobs,
            input_ids=list(self.ids),
            labels=labels,
            finished=is_finished(last.finish_reason),
            finish_reason=last.finish_reason,
            prompt_tokens=self.turns[0].start,
            output_tokens=trained,
            metadata={"turns": len(self.turns)},
            version_spans=spans,
            temperature=last.temperature,
        )


def text_of_call(call: LLMCall, reward: float | None = None) -> TrainingText:
    """Return one call, with its `prompt_text`, as a sample: only its output is trained."""
    transcript = Transcript()
    transcript.add(call, (call.prompt_text or "") + call.output_text)
    text = transcript.training_text(reward)
    text.metadata = {}
    return text


def _append_spans(spans: list[VersionSpan], more: list[VersionSpan], offset: int) -> None:
    """Append `more`, shifted by `offset`; adjacent spans of one version are merged."""
    for span in more:
        start, end = span.start + offset, span.end + offset
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(span.version, start, end))


def check_result(result: Any, function: Any) -> RolloutResult:
    """Return `result` if it is a `RolloutResult` with texts and metrics.

    Raises:
        DomainError: it is something else. The run ends: the user has to change `function`.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    name = f"actor.rollout_policy: {getattr(function, '__name__', type(function).__name__)}{where}"
    if not isinstance(result, RolloutResult):
        missing = " Is a `return` missing?" if result is None else ""
        raise DomainError(
            f"{name} returned {_shown(result)}, expected a RolloutResult (from pipelinerl.rollouts).{missing} "
            "Return RolloutResult(training_texts=[...], metrics=BaseMetrics(...))."
        )
    if not isinstance(result.metrics, BaseMetrics):
        raise DomainError(
            f"{name} returned metrics of type {type(result.metrics).__name__}, expected BaseMetrics (from "
            "pipelinerl.rollouts) or a subclass."
        )
    texts = result.training_texts
    if not isinstance(texts, list | tuple) or not all(isinstance(text, TrainingText) for text in texts):
        raise DomainError(
            f"{name} returned training_texts {_shown(texts)}, expected a list of TrainingText. "
            "Make them with make_training_text(llm, llm_call)."
        )
    return result


def complete_texts(result: RolloutResult, temperature: float, versions: Collection[int]) -> None:
    """Fill in what a hand-made text may omit: version and temperature.

    Args:
        versions: policy versions that answered them.

    Raises:
        RolloutError: `unversioned`, if several versions are possible.
    """
    unversioned = []
    for text in result.training_texts:
        if text.temperature is None:
            text.temperature = temperature
        if not text.version_spans:
            unversioned.append(text)
    if not unversioned:
        return
    version = _version_of(result.model_version, versions)
    for text in unversioned:
        labels = list(text.labels)
        trained = len(labels) - labels.count(IGNORED_LABEL)
        if version is not None and trained:
            text.version_spans = [VersionSpan(version, 0, trained)]


def _version_of(stated: Any, seen: Collection[int]) -> int | None:
    """Return the version of texts without spans: the stated one, else the only one seen; None if unknown."""
    versions = ", ".join(map(str, sorted(seen)))
    if stated is None:
        if len(seen) > 1:
            raise RolloutError(
                "unversioned",
                f"no version spans, and versions {versions} answered the rollout's requests; use make_training_text, "
                "or set version_spans (LLMCall has them) or RolloutResult.model_version",
            )
        return next(iter(seen), None)
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 0:
        raise RolloutError("unversioned", f"model_version is {stated!r}, expected the number of a policy version")
    if seen and stated not in seen:
        raise RolloutError(
            "unversioned", f"model_version is {stated}, but version {versions} answered the rollout's requests; omit it"
        )
    return stated


def build_samples(
    texts: list[TrainingText],
    *,
    group_id: str,
    rollout_id: str,
    incarnation: int = 0,
    temperature: float | None = None,
) -> list[Sample]:
    """Return a rollout's texts as samples with ids `{rollout_id}/s{k}`.

    Args:
        temperature: of the trainer's log-probs; texts sampled at another one are rejected. None accepts any.

    Raises:
        RolloutError: a text cannot be trained on, so the whole rollout fails; `reason` says why.
    """
    samples = []
    for index, text in enumerate(texts):
        trained = _check_lengths(text)
        spans = _spans_of(text)
        if not spans:
            raise RolloutError(
                "unversioned",
                "no version spans, and this handle's server answered no request; use make_training_text, or set "
                "version_spans or RolloutResult.model_version",
            )
        check_spans(spans, trained)
        sample = Sample(
            id=f"{rollout_id}/s{index}",
            group_id=group_id,
            rollout_id=rollout_id,
            input_ids=list(text.input_ids),
            labels=list(text.labels),
            logprobs=list(map(float, text.logprobs)),
            reward=_reward_of(text),
            finished=bool(text.finished),
            finish_reason=_finish_reason_of(text),
            prompt_tokens=text.prompt_tokens,
            output_tokens=text.output_tokens,
            version_spans=spans,
            temperature=1.0 if text.temperature is None else float(text.temperature),
            ref_logprobs=list(text.ref_logprobs),
            incarnation=incarnation,
            metadata=plain_metadata(text.metadata),
        )
        if temperature is not None and sample.temperature != temperature:
            raise RolloutError(
                "other_temperature",
                f"sampled at temperature {sample.temperature:g}, trained at {temperature:g}: old and new log-probs "
                "would belong to different policies. Leave llm.parameters['temperature'] unchanged",
            )
        samples.append(sample)
    return samples


def recorded_samples(
    texts: list[TrainingText], *, group_id: str, rollout_id: str, incarnation: int, reward: float
) -> list[EvaluationSample]:
    """Return the texts of an evaluation's rollout, for people to read, with ids `{rollout_id}/s{k}`.

    They are never trained on, so texts without log-probs, rewards or ids are recorded as they are.

    Args:
        reward: of the rollout, for texts without one.

    Raises:
        Exception: of any kind, if a field has the wrong type.
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
            finish_reason=str(_finish_reason_of(text)),
            prompt_tokens=int(text.prompt_tokens),
            output_tokens=int(text.output_tokens),
            version_spans=_spans_of(text),
            temperature=_finite(text.temperature, 1.0),
            incarnation=incarnation,
            metadata=plain_metadata(text.metadata),
            prompt_text="" if len(text.input_ids) else encodable(text.prompt_text),
            output_text="" if len(text.input_ids) else encodable(text.output_text),
        )
        for index, text in enumerate(texts)
    ]


def summarize(result: RolloutResult, rollout_id: str) -> RolloutSummary:
    """Return the numbers of a rollout, without metrics beyond the range of fp32 (their means may be infinite).

    Raises:
        RolloutError: `bad_reward` or `bad_value`, if the reward in the metrics or the latency is not such a number.
    """
    latency_s = float(result.latency or 0.0)
    if not _fits(latency_s):
        raise RolloutError("bad_value", f"latency is {latency_s}, expected seconds")
    metrics = {}
    for name, value in result.metrics.model_dump().items():
        if name not in ("reward", "success") and isinstance(value, bool | int | float) and _fits(value):
            metrics[name] = float(value)
    return RolloutSummary(
        rollout_id=rollout_id,
        reward=checked_reward(result.metrics.reward),
        success=bool(result.metrics.success),
        num_samples=len(result.training_texts),
        output_tokens=sum(text.output_tokens for text in result.training_texts),
        latency_s=latency_s,
        metrics=metrics,
        num_cut=sum(_finish_reason_of(text) == "length" for text in result.training_texts),
    )


def version_range(texts: list[TrainingText], seen: Collection[int] = ()) -> tuple[int, int] | None:
    """Return the oldest and the newest policy version that sampled a token, or None without tokens.

    Args:
        seen: versions that answered its requests, used if the texts name none.
    """
    versions = [span.version for text in texts for span in text.version_spans] or seen
    return (min(versions), max(versions)) if versions else None


def checked_reward(value: Any) -> float:
    """Return a reward as a float; 0.0 stays 0.0.

    Raises:
        RolloutError: `bad_reward` for None, NaN, values beyond fp32, and anything that is not one number.
    """
    if not hasattr(value, "__float__") or isinstance(value, str):
        raise RolloutError("bad_reward", f"reward is {value!r}, expected a number")
    try:
        reward = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # an array or tensor of several numbers
        raise RolloutError("bad_reward", f"reward is {str(value)[:80]}, expected one number: {error}") from error
    if not _fits(reward):
        raise RolloutError("bad_reward", f"reward is {reward}, expected a number within the range of fp32")
    return reward


def plain_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return `metadata` as plain data of the same shape.

    What a record cannot hold becomes text: objects, NaN and infinities, integers beyond 64 bits. Lone surrogates become
    question marks.

    Raises:
        Exception: of any kind, if it is not a dict or contains itself.
    """
    if not metadata:
        return {}
    text = json.dumps(msgspec.to_builtins(metadata, enc_hook=str, str_keys=True), ensure_ascii=False)
    return dict(json.loads(encodable(text), parse_constant=str, parse_int=_integer))


def encodable(text: str) -> str:
    """Return `text` with question marks for lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def safe_text(value: object) -> str:
    """Return the text of an exception or another object of user code, even if its `__str__` fails."""
    try:
        return encodable(str(value))
    except Exception:  # noqa: BLE001 - user code
        return f"<{type(value).__name__} without a text>"


def _check_lengths(text: TrainingText) -> int:
    """Return the number of trained tokens after checking that ids, labels and log-probs match."""
    if len(text.labels) != len(text.input_ids):
        raise RolloutError("length_mismatch", f"{len(text.labels)} labels for {len(text.input_ids)} ids")
    trained = 0
    for token_id, label in zip(text.input_ids, text.labels, strict=True):
        if label not in (IGNORED_LABEL, token_id) or token_id < 0:
            raise RolloutError("bad_labels", f"label {label} at a position with id {token_id}")
        if label != IGNORED_LABEL:
            trained += 1
    if trained == 0:
        raise RolloutError("no_trained_token", "every label is masked")
    if text.labels[0] != IGNORED_LABEL:
        raise RolloutError("bad_labels", "the first token has no context and cannot be trained")
    if len(text.logprobs) != trained:
        raise RolloutError("length_mismatch", f"{len(text.logprobs)} log-probs for {trained} trained tokens")
    if not are_logprobs(text.logprobs):
        raise RolloutError("bad_logprob", "a log-prob is not finite, positive, or the server's -9999 for NaN")
    if text.ref_logprobs and len(text.ref_logprobs) != trained:
        raise RolloutError("length_mismatch", f"{len(text.ref_logprobs)} reference log-probs for {trained} tokens")
    if not are_logprobs(text.ref_logprobs):
        raise RolloutError("bad_logprob", "a reference log-prob is not finite, positive, or the server's -9999 for NaN")
    return trained


def _reward_of(text: TrainingText) -> float:
    if text.reward is None:  # treating a forgotten reward as 0 would look like a task without any signal
        raise RolloutError(
            "bad_reward",
            "the reward of a training text is None; set text.reward = ... to a number for every returned text "
            "(BaseMetrics.reward is only reported, never trained on)",
        )
    return checked_reward(text.reward)


def _spans_of(text: TrainingText) -> list[VersionSpan]:
    return [VersionSpan(*span) if isinstance(span, tuple) else span for span in text.version_spans]


def _finish_reason_of(text: TrainingText) -> str:
    return text.finish_reason or ("stop" if text.finished else "length")


def _fits(value: float) -> bool:
    return abs(value) <= _LARGEST


def _finite(value: Any, otherwise: float) -> float:
    number = otherwise if value is None else float(value)
    return number if math.isfinite(number) else otherwise


def _integer(digits: str) -> int | str:
    # The longest 64-bit integer has 19 digits and a sign.
    number = int(digits) if len(digits) <= 20 else None
    return number if number is not None and -_INT64_LIMIT <= number < _INT64_LIMIT else digits


def _shown(value: Any) -> str:
    return f"{value!r:.80} (a {type(value).__name__})" if value is not None else "None"
