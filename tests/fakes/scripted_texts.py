"""Scripted answers of a fake server, as texts instead of ids, and a tokenizer whose ids tests write by hand."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from pipelinerl.tiny.tokenizer import build_tokenizer

# Role, content, end: what tests of conversations and agents expect around every message.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>{{ message['content'] or '' }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def chat_tokenizer(max_number: int) -> PreTrainedTokenizerFast:
    """Bytes, and whole numbers up to `max_number`: sampled `1`, `2` reads `12` and re-tokenizes to another id."""
    tokenizer = build_tokenizer(max_number)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class Texts:
    """Answers the texts of `left` in order, byte by byte, with the end token; then `default`, if there is one."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, default: str | None = None) -> None:
        vocabulary = tokenizer.get_vocab()
        self._ids = {chr(code): vocabulary["Ġ" if code == 32 else chr(code)] for code in range(32, 127)}
        self._ids["\n"] = vocabulary["Ċ"]
        self._end = vocabulary["<|end|>"]
        self._default = default
        self.left: list[str] = []

    def ids(self, text: str) -> list[int]:
        return [*(self._ids[character] for character in text), self._end]

    def __call__(self, body: dict[str, Any]) -> list[int]:
        if not self.left and self._default is not None:
            return self.ids(self._default)
        return self.ids(self.left.pop(0))
