"""What the page asks for, as plain data: `Answers` has one method per address of the API.

Every text in an answer is inert: control and formatting characters and lone surrogates are escaped. The page shows
texts as text, never as HTML.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec

from pipelinerl.analysis.sample_view import record_of, record_of_evaluation
from pipelinerl.analysis.select import StoredGroup, places_in_group, rollout_of
from pipelinerl.analysis.view.rollout_index import Filter, Hit, Order
from pipelinerl.analysis.view.watched_run import TOPICS, Source, WatchedRun
from pipelinerl.errors import StreamError
from pipelinerl.records import IGNORED_LABEL, EvaluationRollout, Sample
from pipelinerl.streams.base import ACTOR, PREPROCESSOR, TRAINING_DATA_TOPIC
from pipelinerl.tracking.state import REWARD, SUCCESS, RunState
from pipelinerl.tracking.token_text import TokenText, escaped, one_line, shortened

Answer = dict[str, Any]

#: Points of a curve; longer ones are averaged.
MAX_POINTS = 2000
#: Characters sent of a turn unless all are asked for, and of a line of the list.
MAX_CHARS, PREVIEW_CHARS = 20_000, 200
#: Tokens that are sent at once.
MAX_TOKENS = 4000
MAX_REASONS = 30
#: The remaining time is estimated from the duration of so many steps.
ETA_STEPS = 20
_SEARCH_S = 1.0
_SEARCH_ROLLOUTS = 64
_CURVE_NAMES = {"reward": REWARD, "success": SUCCESS}


class _BatchSample(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    advantage: float | None = None
    ref_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


class _BatchAdvantages(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `TrainingBatch`."""

    step: int
    samples: list[_BatchSample]
    schema: int = 0


class _SampleTokens(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str = ""
    input_ids: list[int] = []
    prompt_tokens: int = 0
    prompt_text: str = ""
    output_text: str = ""


class _RecordTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `Group` or an `EvaluationRollout`."""

    id: str
    problem_id: str = ""
    samples: list[_SampleTokens] = []
    rollouts: list[_SampleTokens] = []
    schema: int = 0


@dataclass(frozen=True)
class Query:
    """One page of the list of rollouts. `text` is searched in their decoded tokens, ignoring case."""

    source: Source = "training"
    wanted: Filter = field(default_factory=Filter)
    steps: tuple[int, int] | None = None
    text: str = ""
    order: Order = "newest"
    below: int | None = None
    skip: int = 0
    count: int = 50


def inert(value: Any) -> Any:
    """`value` (plain data) with every text in it escaped, including keys."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(str(key)): inert(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [inert(item) for item in value]
    return value


class Answers:
    """Answers about `runs`. Thread-safe."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs = runs

    def list_runs(self) -> list[Answer]:
        return [inert({"name": run.name, "folder": str(run.run.run_dir.root)}) for run in self.runs]

    def pulse(self, run: WatchedRun) -> Answer:
        """Tells the page when to ask again."""
        status = run.status()
        return {
            "changes": run.changes,
            "state": inert(status.state),
            "step": status.step,
            "indexed": {source: run.indexed_share(source) for source in TOPICS},
            "rollouts": {source: run.index[source].num_rollouts for source in TOPICS},
        }

    def overview(self, run: WatchedRun) -> Answer:
        """State, processes, evaluations, fates and goodput."""
        status = run.status()
        # Copies, because the feeds continue.
        state, reasons, faults = run.read(lambda state: (_numbers(state), Counter(run.reasons), dict(run.faults)))
        step_s = state.pop("step_s")
        left = None if status.max_steps is None or status.step is None else max(0, status.max_steps - status.step)
        is_running = status.state == "running"
        answer = {
            **msgspec.to_builtins(status),
            **state,
            "eta_s": left * step_s if is_running and left is not None and step_s is not None else None,
            "reasons": [
                {"fate": fate, "reason": reason, "count": count}
                for (fate, reason), count in reasons.most_common(MAX_REASONS)
            ],
            "faults": [{"stream": name, "fault": text} for name, text in faults.items()],
            "datasets": run.index["training"].datasets,
            "evaluation_datasets": run.index["evaluation"].datasets,
            "failures": run.index["evaluation"].failures,
            "model": str(run.run.config.model_path),
        }
        return dict(inert(answer))

    def metric_names(self, run: WatchedRun) -> list[str]:
        return list(inert(["reward", "success", *run.read(lambda state: sorted(state.history))]))

    def curves(self, run: WatchedRun, names: Sequence[str], max_points: int = MAX_POINTS) -> Answer:
        """Values by step: `steps` (ascending), and for each name one value per step or None.

        `hours` of training and `samples` trained up to each step are alternative axes. Beyond `max_points` steps, a
        point is the mean of neighbors.
        """
        found = run.read(lambda state: {name: state.curve(_CURVE_NAMES.get(name, (name,))) for name in names})
        axes = run.read(lambda state: [state.curve((name,)) for name in ("finetune/step_s", "finetune/samples")])
        steps = sorted({step for curve in found.values() for step in curve})
        width = -(-len(steps) // max_points) or 1
        buckets = [steps[start : start + width] for start in range(0, len(steps), width)]
        return {
            "steps": [bucket[-1] for bucket in buckets],
            "hours": [total / 3600 for total in _running_total(axes[0], buckets)],
            "samples": _running_total(axes[1], buckets),
            "series": {
                inert(name): [_mean([curve[step] for step in bucket if step in curve]) for bucket in buckets]
                for name, curve in found.items()
            },
        }

    def rollouts(self, run: WatchedRun, query: Query) -> Answer:
        """A page of rollouts. `next` is the `skip` of the next page, None after the last.

        A search takes at most a second; `looked_at` counts the candidates that it searched.
        """
        index = run.index[query.source]
        wanted = query.wanted
        if query.steps is not None:
            wanted = replace(wanted, keys=run.keys_of_steps(*query.steps))
        below = index.span[1] if query.below is None else query.below
        if not query.text:
            hits, total = index.find(wanted, query.order, below, query.skip, query.count)
            looked_at = query.skip + len(hits)
        else:
            hits, looked_at, total = self._search(run, query, wanted, below)
        return {
            "rows": [inert(hit._asdict()) for hit in hits],
            "total": total,
            "looked_at": looked_at,
            "next": looked_at if looked_at < total else None,
            "below": below,
            "indexed": run.indexed_share(query.source),
        }

    def previews(self, run: WatchedRun, source: Source, places: Sequence[tuple[int, int]]) -> list[Answer]:
        """For each (offset, place): ids, and the beginning of the model's last output."""
        decoder, _ = run.decoder()
        tokens_at = _one_at_a_time(run, source)
        found: dict[tuple[int, int], Answer] = {}
        for offset, place in sorted(set(places)):
            record = tokens_at(offset)
            if record is None:
                continue
            rollout_id, samples = _rollout_tokens(record, source, place)
            text = _said(samples[-1], decoder) if samples else ""
            found[offset, place] = inert(
                {
                    "offset": offset,
                    "place": place,
                    "group_id": record.id if source == "training" else None,
                    "rollout_id": rollout_id,
                    "problem_id": record.problem_id,
                    "text": one_line(shortened(text, PREVIEW_CHARS)[0]),
                }
            )
        return [found[each] for each in places if each in found]

    def group(self, run: WatchedRun, source: Source, offset: int, is_whole: bool = False) -> Answer:
        """The record at `offset` with all its rollouts, turn by turn; at most `MAX_CHARS` per turn unless `is_whole`.

        Raises:
            StreamError: there is none, or it cannot be read.
        """
        record = _existing(run, source, offset)
        decoder, no_text = run.decoder()
        limit = 0 if is_whole else MAX_CHARS
        step = None
        if isinstance(record, EvaluationRollout):
            shown = [record_of_evaluation(record, run.evaluations.has_result(record), decoder, limit)]
        else:
            fates, step = run.fates_of_group(record.id)
            rollouts = [rollout_of(record, name) for name in places_in_group(record)]
            shown = [record_of(rollout, decoder, fates, limit) for rollout in rollouts]
        in_batch = _in_batch(run, step)
        for rollout in shown:
            for sample in rollout["samples"]:
                known = in_batch.get(sample["sample_id"])
                sample["advantage"] = known.advantage if known is not None else None
                del sample["text"]
                for turn in sample["turns"]:
                    turn["num_tokens"] = len(turn.pop("token_ids"))
        return {
            "offset": offset,
            "source": source,
            "group_id": inert(record.group_id if isinstance(record, EvaluationRollout) else record.id),
            "problem_id": inert(record.problem_id),
            "dataset": inert(record.dataset_name),
            "failed_rollouts": getattr(record, "failed_rollouts", 0),
            "step": step,
            "no_text": no_text,
            "rollouts": inert(shown),
        }

    def tokens(self, run: WatchedRun, source: Source, offset: int, place: int, sample: int, start: int = 0) -> Answer:
        """`MAX_TOKENS` tokens of a sample from `start` on, one list per column; None for tokens that were not trained.

        `logprobs` are those of the sampling distribution. `importance` divides the probabilities under the weights in
        training by these, `ratios` those of the reference model; None where they were not recorded.

        Raises:
            StreamError: there is no such sample, or it cannot be read.
        """
        record = _existing(run, source, offset)
        samples: Sequence[Sample]
        if isinstance(record, EvaluationRollout):
            samples, step = record.samples, None
        else:
            names = places_in_group(record)
            samples = rollout_of(record, names[place]).samples if place < len(names) else []
            step = run.fates_of_group(record.id)[1]
        if sample >= len(samples):
            raise StreamError(f"the rollout at offset {offset}, place {place} has {len(samples)} samples")
        chosen = samples[sample]
        known = _in_batch(run, step).get(chosen.id)
        reference = msgspec.json.decode(known.ref_logprobs, type=list[float]) if known is not None else []
        decoder, _ = run.decoder()
        end = min(len(chosen.input_ids), start + MAX_TOKENS)
        importance = run.log_ratios(step, chosen.id) if step is not None else []
        columns = _token_columns(chosen, reference, importance, start, end)
        return {
            "start": start,
            "total": len(chosen.input_ids),
            "texts": [_token(chosen.input_ids, index, decoder) for index in range(start, end)],
            "advantage": known.advantage if known is not None else None,
            **columns,
        }

    def _search(self, run: WatchedRun, query: Query, wanted: Filter, below: int) -> tuple[list[Hit], int, int]:
        """(hits, candidates searched so far, candidates in all)."""
        decoder, _ = run.decoder()
        deadline = time.monotonic() + _SEARCH_S
        found: list[Hit] = []
        position, text = query.skip, query.text.casefold()
        tokens_at = _one_at_a_time(run, query.source)
        while True:
            hits, total = run.index[query.source].find(wanted, query.order, below, position, _SEARCH_ROLLOUTS)
            for hit in hits:
                if len(found) == query.count or time.monotonic() > deadline:
                    return found, position, total
                position += 1
                record = tokens_at(hit.offset)
                if record is not None and any(text in part.casefold() for part in _texts(record, query, hit, decoder)):
                    found.append(hit)
            if not hits:
                return found, position, total


def _numbers(state: RunState) -> Answer:
    """What the overview needs of the state. `step_s`: mean duration of the last steps."""
    durations = list(state.curve(("finetune/step_s",)).values())[-ETA_STEPS:]
    tokens = state.fate_tokens
    return {
        "step_s": sum(durations) / len(durations) if durations else None,
        "version": state.version,
        "weight_updates": state.weight_updates,
        "training_s": state.training_seconds,
        "stall_s": state.stall_seconds,
        "latest": dict(state.latest),
        "fates": state.fates,
        "fate_tokens": tokens,
        "goodput": tokens.get("trained", 0) / sum(tokens.values()) if sum(tokens.values()) else None,
        "success_before": state.held_out_success("before"),
        "success_after": state.held_out_success("after"),
        "evaluations": [msgspec.to_builtins(result) for result in state.evaluations],
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(f"{sum(values) / len(values):.6g}") if values else None


def _running_total(values: dict[int, float], buckets: Sequence[Sequence[int]]) -> list[float]:
    """Sum of the values up to the last step of each bucket."""
    total, rest = 0.0, iter(values.items())
    step, value = next(rest, (None, 0.0))
    totals = []
    for bucket in buckets:
        while step is not None and step <= bucket[-1]:
            total += value
            step, value = next(rest, (None, 0.0))
        totals.append(total)
    return totals


def _existing(run: WatchedRun, source: Source, offset: int) -> StoredGroup | EvaluationRollout:
    topic, _, kind = TOPICS[source]
    record: StoredGroup | EvaluationRollout | None = run.record(topic, ACTOR, kind, offset)
    if record is None:
        raise StreamError(f"stream {topic}: there is no record at offset {offset}")
    return record


def _one_at_a_time(run: WatchedRun, source: Source) -> Callable[[int], _RecordTokens | None]:
    """A function from offset to record that caches only the last one: a record may have many megabytes."""

    @lru_cache(maxsize=1)
    def tokens_at(offset: int) -> _RecordTokens | None:
        record: _RecordTokens | None = run.record(TOPICS[source][0], ACTOR, _RecordTokens, offset)
        return record

    return tokens_at


def _rollout_tokens(record: _RecordTokens, source: Source, place: int) -> tuple[str, list[_SampleTokens]]:
    """Id and samples of the rollout at `place`. A record of an evaluation is one rollout."""
    if source == "evaluation":
        return record.id, record.samples
    name = next(islice(places_in_group(record), place, None), "")
    return name, [sample for sample in record.samples if sample.rollout_id == name]


def _said(sample: _SampleTokens, decoder: TokenText | None) -> str:
    if sample.input_ids and decoder is not None:
        return decoder.whole(sample.input_ids[sample.prompt_tokens :][:PREVIEW_CHARS])
    return sample.output_text


def _texts(record: _RecordTokens, query: Query, hit: Hit, decoder: TokenText | None) -> Iterator[str]:
    for sample in _rollout_tokens(record, query.source, hit.place)[1]:
        if decoder is not None:
            yield decoder.whole(sample.input_ids)
        yield sample.prompt_text
        yield sample.output_text


def _in_batch(run: WatchedRun, step: int | None) -> dict[str, _BatchSample]:
    """The samples of the batch of `step`, by id; none if it is gone."""
    if step is None:
        return {}
    with suppress(StreamError):
        # There is one batch per step from step 1 on, so the step gives the offset.
        batch = run.record(TRAINING_DATA_TOPIC, PREPROCESSOR, _BatchAdvantages, step - 1)
        if batch is not None and batch.step == step:
            return {sample.id: sample for sample in batch.samples}
    return {}


def _token(token_ids: Sequence[int], index: int, decoder: TokenText | None) -> str:
    return escaped(decoder.part(token_ids, index, index + 1)) if decoder is not None else f"<|id {token_ids[index]}|>"


def _token_columns(
    sample: Sample, reference: Sequence[float], log_ratios: Sequence[float], start: int, end: int
) -> dict[str, list[Any]]:
    """`logprobs`, `importance`, `ratios`, `versions` of tokens [start, end); None where a token has no such number."""
    logprobs: list[float | None] = [None] * len(sample.input_ids)
    importance, ratios = list(logprobs), list(logprobs)
    versions: list[int | None] = [None] * len(sample.input_ids)
    positions = [at for at, label in enumerate(sample.labels[: len(versions)]) if label != IGNORED_LABEL]
    for at, logprob in zip(positions, sample.logprobs, strict=False):
        logprobs[at] = logprob
    for at, logprob, other in zip(positions, sample.logprobs, reference, strict=False):
        ratios[at] = _ratio(other - logprob)
    for at, log_ratio in zip(positions, log_ratios, strict=False):
        importance[at] = _ratio(log_ratio)
    for span in sample.version_spans:
        for at in positions[span.start : span.end]:
            versions[at] = span.version
    columns: dict[str, list[Any]] = {
        "logprobs": logprobs,
        "importance": importance,
        "ratios": ratios,
        "versions": versions,
    }
    return {name: values[start:end] for name, values in columns.items()}


def _ratio(log_ratio: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if math.isnan(log_ratio) else math.exp(max(-50.0, min(50.0, log_ratio)))
