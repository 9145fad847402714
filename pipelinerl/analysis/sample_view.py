"""Recorded rollouts as plain records: as JSON, and as text for the terminal.

Every line of model text gets a prefix, and its control characters are escaped, so it can neither imitate our own lines
nor control the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from pipelinerl.analysis.select import StoredRollout
from pipelinerl.records import IGNORED_LABEL, EvaluationRollout, RolloutSummary, Sample
from pipelinerl.tracking.token_text import TokenText, escaped, one_line, shortened

Record = dict[str, Any]
LEGEND = "> is text that the model generated and is trained on, | is text that it was given (or that is masked)."
EVALUATION_LEGEND = (
    "> is text that the model generated, | is text that it was given (or that is masked). Not trained on."
)
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_NAMES = {"prompt": "prompt", "context": "context, not trained", "generated": "generated"}
# For lines about a rollout: parts of them come from user code.
_MAX_LINE = 2000


def record_of(rollout: StoredRollout, decoder: TokenText | None, fates: Mapping[str, str], max_chars: int) -> Record:
    """What to show of a training rollout; of each text at most `max_chars` characters (0: all)."""
    group = rollout.group
    return {
        "dataset": group.dataset_name,
        "problem_id": group.problem_id,
        "group_id": group.id,
        "rollout_id": rollout.rollout_id,
        "incarnation": group.incarnation,
        **_reported(rollout.summary),
        "samples": [
            _sample(each, _turns(each, decoder, max_chars), fates.get(each.id, "pending")) for each in rollout.samples
        ],
    }


def record_of_evaluation(
    rollout: EvaluationRollout, has_result: bool, decoder: TokenText | None, max_chars: int
) -> Record:
    """The same for a rollout of an evaluation, which is not trained on. `has_result`: the evaluation finished."""
    samples = []
    for each in rollout.samples:
        texts = {"prompt": each.prompt_text, "generated": each.output_text}
        turns = (
            _turns(each, decoder, max_chars, is_trained=False)
            if each.input_ids
            else [_turn(kind, text, max_chars) for kind, text in texts.items()]
        )
        sampled = len(each.labels) - each.labels.count(IGNORED_LABEL) if each.input_ids else each.output_tokens
        masked = max(0, each.output_tokens - sampled)
        own = {"trained_tokens": 0, "masked_tokens": masked, "tokens_removed": False}
        samples.append(_sample(each, turns, "not trained") | own)
    names = ("due_version", "is_final", "min_version", "max_version", "problem", "failure", "message")
    return {
        "dataset": rollout.dataset_name,
        "problem_id": rollout.problem_id,
        "group_id": rollout.group_id,
        "rollout_id": rollout.id,
        "incarnation": rollout.incarnation,
        **_reported(rollout.summary),
        **{name: getattr(rollout, name) for name in names},
        "has_result": has_result,
        "samples": samples,
    }


def _reported(summary: RolloutSummary | None) -> Record:
    """What the rollout reported; None: unknown."""
    return {
        "rollout_reward": summary.reward if summary else None,
        "success": summary.success if summary else None,
        "latency_s": summary.latency_s if summary else None,
        "metrics": summary.metrics if summary else {},
    }


def _sample(sample: Sample, turns: list[Record], fate: str) -> Record:
    """`masked_tokens` were sampled but are not trained on."""
    versions = [span.version for span in sample.version_spans]
    trained = sum(span.end - span.start for span in sample.version_spans)
    texts = [turn["text"] for turn in turns]
    names = ("reward", "finished", "finish_reason", "prompt_tokens", "output_tokens", "temperature", "metadata")
    return {
        "sample_id": sample.id,
        **{name: getattr(sample, name) for name in names},
        **_ends(versions),
        "trained_tokens": trained,
        "masked_tokens": max(0, sample.output_tokens - trained),
        "tokens_removed": not sample.input_ids,
        "fate": fate,
        "turns": turns,
        "text": "".join(texts) if texts and None not in texts else None,
    }


def _turn(kind: str, text: str | None, max_chars: int, **known: Any) -> Record:
    """`prompt` is the first request, `generated` is what the model sampled.

    `context` is everything else that is not trained on: text of tools, users or the chat template, and masked output
    (a record does not tell these apart).
    """
    shown, cut = shortened(text, max_chars) if text is not None else (None, 0)
    empty: Record = {"trained": False, "first_version": None, "last_version": None, "token_ids": []}
    return {"kind": kind, **empty, **known, "text": shown, "cut_chars": cut}


def _ends(versions: list[int]) -> Record:
    return {"first_version": versions[0] if versions else None, "last_version": versions[-1] if versions else None}


def _turns(sample: Sample, decoder: TokenText | None, max_chars: int, is_trained: bool = True) -> list[Record]:
    """The turns of `sample`, in order, without gaps; none if its tokens were removed."""
    length = len(sample.input_ids)
    labels = [*sample.labels[:length], *([IGNORED_LABEL] * (length - len(sample.labels)))]
    turns: list[Record] = []

    def add(kind: str, start: int, end: int, **known: Any) -> None:
        if end > start:
            text = decoder.part(sample.input_ids, start, end) if decoder is not None else None
            turns.append(_turn(kind, text, max_chars, token_ids=sample.input_ids[start:end], **known))

    position = sampled = 0
    for has_label, run in groupby(labels, lambda label: label != IGNORED_LABEL):
        start, position = position, position + sum(1 for _ in run)
        if not has_label:
            prompt_end = min(position, sample.prompt_tokens) if start == 0 else start
            add("prompt", start, prompt_end)
            add("context", prompt_end, position)
            continue
        before, sampled = sampled, sampled + position - start
        own = [span.version for span in sample.version_spans if span.start < sampled and span.end > before]
        add("generated", start, position, trained=is_trained, **_ends(own))
    return turns


def rows(record: Record) -> list[Record]:
    """One row per sample, with what is known of its rollout; a rollout without samples has one row, too."""
    rollout = {name: value for name, value in record.items() if name != "samples"}
    return [{**rollout, **sample} for sample in record["samples"]] or [{**rollout, "sample_id": None}]


def json_lines(record: Record) -> list[str]:
    """Its rows as JSON: ASCII without control characters, safe to print in a terminal."""
    return [json.dumps(row, ensure_ascii=True, default=str).replace("\x7f", "\\u007f") for row in rows(record)]


def render(record: Record, has_colors: bool = False) -> str:
    """One rollout with all its samples."""
    bold, dim, reset = (_BOLD, _DIM, _RESET) if has_colors else ("", "", "")
    group = "" if "due_version" in record else f"group {record['group_id']}, "
    title = f"rollout {record['rollout_id']}: data set {record['dataset']}, {group}problem {record['problem_id']}"
    lines = [f"{bold}{_line(title)}{reset}", *(f"  {_line(each)}" for each in _about(record))]
    for sample in record["samples"]:
        lines += [f"  {_line(each)}" for each in _about_sample(sample)]
        for turn in sample["turns"]:
            count, mark = len(turn["token_ids"]), ">" if turn["kind"] == "generated" else "|"
            by = "" if turn["first_version"] is None else f", {_versions(turn['first_version'], turn['last_version'])}"
            lines.append(f"{dim}  {_NAMES[turn['kind']]} ({count} token{'s' * (count != 1)}{by}){reset}")
            if turn["text"] is not None:
                shown = [f"  {mark} {line}".rstrip(" ") for line in escaped(turn["text"]).split("\n")]
                lines += shown if mark == ">" else [f"{dim}{line}{reset}" for line in shown]
            if turn["cut_chars"]:
                lines.append(f"  ~ {turn['cut_chars']} characters are not shown here (--max-chars 0 shows all)")
    return "\n".join(lines)


def _line(text: str) -> str:
    return shortened(one_line(text), _MAX_LINE)[0]


def _about(record: Record) -> Iterator[str]:
    if "due_version" in record:
        final = "the final evaluation, " if record["is_final"] else ""
        first, last = record["min_version"], record["max_version"]
        by = "" if first is None else f", sampled by {_versions(first, last)}"
        yield f"{final}due at version {record['due_version']}{by}"
        if not record["has_result"]:
            yield "NO RESULT of this evaluation: it is still running, was cut off, or failed as a whole"
        yield f"problem: {record['problem']}"
        if record["failure"]:
            yield f"FAILED: {record['failure']}"
        if record["message"]:
            yield f"message: {record['message']}"
    if record["rollout_reward"] is not None:
        success = "success" if record["success"] else "no success"
        yield f"reward {record['rollout_reward']:g}, {success}, {record['latency_s']:.1f} s"
    metrics = {name: value for name, value in record["metrics"].items() if name not in ("reward", "success")}
    if metrics:
        yield "metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items())
    if not record["samples"] and "due_version" not in record:
        yield "no samples: this rollout has nothing to train on"
    elif not record["samples"] and not record["failure"]:
        yield "no texts: the rollout returned none that can be recorded"


def _about_sample(sample: Record) -> Iterator[str]:
    versions = _versions(sample["first_version"], sample["last_version"])
    tokens = f"{sample['prompt_tokens']} prompt + {sample['output_tokens']} output tokens"
    yield f"sample {sample['sample_id']}: reward {sample['reward']:g}, {versions}, {tokens}, {sample['fate']}"
    flags = [f"finish reason {sample['finish_reason']}"]
    if not sample["finished"]:
        flags.append("TRUNCATED: the model did not finish it")
    if sample["masked_tokens"]:
        flags.append(f"MASKED: {sample['masked_tokens']} of its output tokens are not trained on")
    if sample["tokens_removed"]:
        flags.append("no text: its tokens were removed (streams.retention=heads)")
    yield ", ".join(flags)
    if sample["metadata"]:
        yield f"metadata: {json.dumps(sample['metadata'], ensure_ascii=False, default=str)}"


def _versions(first: int | None, last: int | None) -> str:
    if first is None:
        return "no version"
    return f"version {first}" if first == last else f"versions {first}..{last}"
