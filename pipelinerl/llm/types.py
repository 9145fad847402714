"""What a rollout says to a server and gets back: `Prompt`, `LLMOutput`, `LLMCall`. Plain data; waits for nothing.

Made by user code (`Prompt`) and by the client (`LLMCall`), read by user code and by the sample builder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipelinerl.records import VersionSpan


@dataclass(slots=True)
class Prompt:
    """A chat (`messages` in OpenAI format, with optional `tools`), or ready `token_ids`, sent as they are."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


@dataclass(slots=True)
class LLMOutput:
    """The model's answer as text, without special tokens and without the stop string that ended it."""

    content: str | None = None
    role: str = "assistant"
    tool_calls: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class LLMCall:
    """One answered request.

    `output_token_ids`, `logprobs` (natural logs, of the sampling distribution) have one entry per sampled token;
    `version_spans` cover them without gaps. Ids are the server's own, never re-tokenized text.
    """

    prompt: Prompt
    output: LLMOutput
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version_spans: list[VersionSpan]
    prompt_text: str | None = None
    output_text: str = ""
    ended_by_stop_string: bool = False

    @property
    def prompt_length_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_length_tokens(self) -> int:
        return len(self.output_token_ids)
