"""Turns chats into token ids and token ids into text, with the model's own chat template.

Called by `llm_async_generate` for every request, from any task or thread. Waits for nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipelinerl.errors import RolloutError

# Attempts at one problem share their first prompt; more entries would hold memory for nothing.
_CACHED_CHATS = 512
_CACHED_CHARACTERS_LIMIT = 20_000


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
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # The template is a program of the model's authors, run on messages of the user: any exception is possible.
            raise RolloutError("bad_prompt", f"the chat template refused the messages: {error}") from error
        ids = self.encode(text)
        if key is not None and len(text) <= _CACHED_CHARACTERS_LIMIT:
            with self._lock:
                self._cache[key] = (text, ids)
                if len(self._cache) > _CACHED_CHATS:
                    self._cache.popitem(last=False)
        return text, list(ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens in it included and none added."""
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids beyond the tokenizer (padded rows) are left out."""
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
