"""Turns chats into token ids and token ids into text, with the model's own chat template.

Called by `llm_async_generate` for every request, from any task or thread. Waits for nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Encoding, Tokenizer

from pipelinerl.errors import RolloutError
from pipelinerl.llm.byte_text import byte_text

# Attempts at one problem share their first prompt; more entries would hold memory for nothing.
_CACHED_CHATS = 512
_CACHED_CHARACTERS_LIMIT = 20_000
# Enough for any rule that looks at what stands before a piece of text.
_CONTEXT_CHARACTERS = 64


class ChatRenderer:
    """Renders chats with `tokenizer`, a Hugging Face tokenizer with a chat template.

    Encoding uses a private copy of the fast tokenizer, whose settings nobody changes: that is what makes it safe to use
    from several threads. A tokenizer without a fast backend is used under a lock.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, tuple[str, list[int]]] = OrderedDict()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._fast: Tokenizer | None = None
        if isinstance(backend, Tokenizer):
            self._fast = Tokenizer.from_str(backend.to_str())
            self._fast.no_truncation()
            self._fast.no_padding()
        self._table = byte_text(self._fast) if self._fast is not None else None

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, list[int]]:
        """Return prompt text and prompt ids for `messages`, ready for the assistant's turn.

        Raises:
            RolloutError: `bad_prompt` when the chat template cannot render these messages.
        """
        key = _cache_key(messages, tools)
        if key is not None:
            with self._lock:
                cached = self._cache.get(key)
            if cached is not None:
                return cached[0], list(cached[1])
        text = self.render_text(messages, tools)
        ids = self.encode(text)
        if key is not None and len(text) <= _CACHED_CHARACTERS_LIMIT:
            with self._lock:
                self._cache[key] = (text, ids)
                if len(self._cache) > _CACHED_CHATS:
                    self._cache.popitem(last=False)
        return text, list(ids)

    def render_text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt text for `messages`, ready for the assistant's turn unless told otherwise.

        Raises:
            RolloutError: `bad_prompt`, as in `render`.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:
            if not getattr(self._tokenizer, "chat_template", True):
                raise RolloutError(
                    "bad_prompt",
                    "the prompt is a list of messages, and the model's tokenizer has no chat template to write them. "
                    "Use an instruction-tuned model, put its chat_template.jinja into the model's folder, or give the "
                    "prompt as token ids (Prompt(token_ids=...))",
                ) from error
            # The template is a program of the model's authors, run on messages of the user: any exception is possible.
            raise RolloutError("bad_prompt", f"the chat template refused the messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens in it included and none added.

        Raises:
            RolloutError: `bad_prompt` for text that has no UTF-8 form (half of a surrogate pair).
        """
        if self._fast is not None:
            return self._encode_fast(text).ids
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of `text` as they are when it follows `before`, whose own ids are not asked for.

        Some tokenizers write the first word of a text in another way than the same word further on.
        """
        if self._fast is None or not text:
            return self.encode(text)
        context = before[-_CONTEXT_CHARACTERS:]
        encoding = self._encode_fast(context + text)
        boundary = len(context)
        first = next((i for i, (start, _) in enumerate(encoding.offsets) if start >= boundary), None)
        if first is None or any(end > boundary for _, end in encoding.offsets[:first]):
            return self.encode(text)  # one token lies across the border: the text alone is the best there is
        return list(encoding.ids[first:])

    def is_special(self, token_id: int) -> bool:
        """Return whether decoding leaves this id out: end of message, padding, and the like."""
        return not self.decode([token_id]) and bool(self.decode([token_id], skip_special_tokens=False))

    def _encode_fast(self, text: str) -> Encoding:
        assert self._fast is not None
        try:
            return self._fast.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise RolloutError("bad_prompt", f"the prompt cannot be written as UTF-8: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids beyond the tokenizer (padded rows) are left out."""
        if self._table is not None:
            return self._table.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if self._fast is not None:
            return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        with self._lock:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _cache_key(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> bytes | None:
    """Return bytes that tell this chat from every other, or None when it holds objects of other kinds."""
    try:
        return msgspec.json.encode((messages, tools))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def cut_at(text: str, stop: str) -> str:
    """Return `text` up to the last `stop` in it, which is the one that ended the output."""
    index = text.rfind(stop)
    return text if index < 0 else text[:index]
