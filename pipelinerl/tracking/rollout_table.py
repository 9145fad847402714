"""Some rollouts of every evaluation as rows of text, for trackers that show tables.

Every evaluation shows the same problems, so that they can be followed through training. The number of rows and the
length of texts are bounded. Control characters of model text are escaped; trackers must show it as plain text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.records import EvaluationResult, EvaluationRollout, EvaluationSample
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import EVALUATION_ROLLOUTS_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tracking.token_text import TokenText, escaped, shortened, token_text

#: Characters per cell; longer texts lose their middle.
MAX_CHARS = 2000
COLUMNS = ("version", "sampled_by", "problem", "prompt", "answer", "reward", "success", "tokens", "end")


@dataclass(frozen=True)
class RolloutTable:
    """Rollouts of one evaluation and data set.

    Attributes:
        version: policy version that the evaluation was due at, the step of its numbers.
        columns: names of the cells. `sampled_by`: versions that sampled the answer, `tokens`: their number, `end`:
            finish reason or `failed`. Reward and success of a failed rollout are None.
        rows: one per rollout.
    """

    dataset: str
    version: int
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    @property
    def name(self) -> str:
        """Its name in trackers."""
        return f"evaluation/{self.dataset}/rollouts"  #: table of some of its rollouts (W&B, Trackio)


class RolloutTables:
    """Makes the tables of one run from the rollouts that job `actor` recorded. Not thread-safe."""

    def __init__(self, hub: StreamHub, run_dir: RunDir, config: RunConfig, actor: str) -> None:
        self._run_dir, self._config = run_dir, config
        self._limit = config.tracking.rollouts_per_evaluation
        # Earlier starts of the run had their tables.
        start = max(hub.places(EVALUATION_ROLLOUTS_TOPIC, actor), default=0)
        self._reader = hub.reader(EVALUATION_ROLLOUTS_TOPIC, actor, EvaluationRollout, start)
        self._kept: dict[tuple[int, bool], dict[str, dict[str, EvaluationRollout]]] = {}
        self._tokenizer: tuple[TokenText | None, str] | None = None

    def table_of(self, result: EvaluationResult) -> RolloutTable | None:
        """The rollouts of `result`, which are in the stream by now; None: none were recorded.

        Raises:
            StreamError: the stream cannot be read.
        """
        while entries := self._reader.read(0):
            for entry in entries:
                self._keep(entry.record)
        key = (result.due_version, result.is_final)
        # Earlier evaluations are done; of later ones there may be rollouts already.
        self._kept = {each: found for each, found in self._kept.items() if each >= key}
        chosen = self._kept.get(key, {}).get(result.dataset_name, {})
        if not chosen:
            return None
        rows = [self._row(chosen[problem]) for problem in sorted(chosen, key=_rank)]
        return RolloutTable(result.dataset_name, result.due_version, COLUMNS, rows)

    def close(self) -> None:
        self._reader.close()

    def _keep(self, rollout: EvaluationRollout) -> None:
        """Keep the first attempt at each problem, up to the limit."""
        chosen = self._kept.setdefault((rollout.due_version, rollout.is_final), {}).setdefault(rollout.dataset_name, {})
        known = chosen.get(rollout.problem_id)
        # Rollouts of an interrupted evaluation are repeated under the same name.
        if known is None or (len(rollout.id), rollout.id) <= (len(known.id), known.id):
            chosen[rollout.problem_id] = rollout
        if len(chosen) > self._limit:
            del chosen[max(chosen, key=_rank)]

    def _row(self, rollout: EvaluationRollout) -> tuple[Any, ...]:
        samples, summary = rollout.samples, rollout.summary
        first, last = rollout.min_version, rollout.max_version
        sampled_by = "" if first is None else str(first) if first == last else f"{first}..{last}"
        prompt = self._text(samples[0], is_prompt=True) if samples else rollout.problem
        answer = "\n\n".join(self._text(each, is_prompt=False) for each in samples)
        end = samples[-1].finish_reason if samples else ""
        if rollout.failure:
            answer, end = f"{rollout.failure}: {rollout.message}", "failed"
        return (
            rollout.due_version,
            sampled_by,
            _cell(rollout.problem_id),
            _cell(prompt),
            _cell(answer),
            None if summary is None else summary.reward,
            None if summary is None else summary.success,
            0 if summary is None else summary.output_tokens,
            _cell(end),
        )

    def _text(self, sample: EvaluationSample, is_prompt: bool) -> str:
        if not sample.input_ids:
            return sample.prompt_text if is_prompt else sample.output_text
        split = min(sample.prompt_tokens, len(sample.input_ids))
        token_ids = sample.input_ids[:split] if is_prompt else sample.input_ids[split:]
        if self._tokenizer is None:
            self._tokenizer = token_text(self._config, self._run_dir)
        decoder, reason = self._tokenizer
        return f"({len(token_ids)} tokens; {reason})" if decoder is None else _decoded(decoder, token_ids)


def _decoded(decoder: TokenText, token_ids: Sequence[int]) -> str:
    """Their text, or only both ends if the middle would not be shown."""
    if len(token_ids) <= 2 * MAX_CHARS:
        return decoder.whole(token_ids)
    return f"{decoder.whole(token_ids[:MAX_CHARS])} ... {decoder.whole(token_ids[-MAX_CHARS:])}"


def _cell(text: str) -> str:
    return shortened(escaped(text), MAX_CHARS)[0]


def _rank(problem_id: str) -> tuple[int, str]:
    """A fixed order of problems that does not depend on their content."""
    return zlib.crc32(problem_id.encode("utf-8", "backslashreplace")), problem_id
