"""One growing token sequence: what the server saw and sampled over several turns, and its trainable form. Pure.

Filled by the chat and by the agent function; the texts it makes go through the same checks as every other sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelinerl.llm.answers import is_finished
from pipelinerl.llm.types import LLMCall
from pipelinerl.records import IGNORED_LABEL, VersionSpan

if TYPE_CHECKING:
    from pipelinerl.rollouts import TrainingText


@dataclass(slots=True)
class Turn:
    """Output tokens `[start, end)` of the sequence, the call that sampled them and the reward of this turn, if any."""

    start: int
    end: int
    call: LLMCall
    reward: float | None = None


@dataclass(slots=True)
class Transcript:
    """`ids` are those of the last prompt and the answer to it; `text` is the same as the chat template writes it."""

    temperature: float
    ids: list[int] = field(default_factory=list)
    text: str = ""
    turns: list[Turn] = field(default_factory=list)

    def add(self, call: LLMCall, text: str) -> None:
        """Add a call whose prompt begins with all ids so far.

        Args:
            call: its ids are kept as they are.
            text: prompt and answer as text.

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

        Without `reward` it has none yet.
        """
        from pipelinerl.rollouts import TrainingText

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
            temperature=self.temperature,
        )


def _append_spans(spans: list[VersionSpan], more: list[VersionSpan], offset: int) -> None:
    """Append `more`, counted from `offset` on; neighbours of one version become one span."""
    for span in more:
        start, end = span.start + offset, span.end + offset
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(span.version, start, end))
