"""Prompts and answers as text and as token ids: the tokenizer and its chat template."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Encoding, Tokenizer

from pipelinerl.errors import RolloutError
from pipelinerl.records import VersionSpan
from pipelinerl.weights.manifest import local_folder

THINK, THOUGHT = "<think>", "</think>"  # around what a model thinks
# Tokenizer classes that their files describe completely. For other names `AutoTokenizer` goes by model type: a Qwen2
# model with its own tokenizer would keep the vocabulary but silently get Qwen2's pre-tokenizer.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# By model type, where `AutoTokenizer` uses the class that the files name.
_NAMED_CLASSES = {("llama", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2Tokenizer")}
# Enough for any pre-tokenizer rule that looks at the preceding text.
_CONTEXT_CHARACTERS = 64
# The attempts of a group share their first prompt and start at about the same time.
_CACHED_PROMPTS = 256


class _TokenizerConfig(msgspec.Struct):
    tokenizer_class: str | None = None
    auto_map: Any = None


class _ModelConfig(msgspec.Struct):
    model_type: str | None = None


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """Return the Hugging Face tokenizer of the model folder or hub name `model_path`.

    Args:
        local_files_only: download nothing.

    Raises:
        OSError: not found.
    """
    folder = local_folder(model_path)
    if folder is None and local_files_only:
        raise OSError(f"{model_path}: it is neither a folder nor in the cache of the hub")
    import transformers

    # `AutoTokenizer` loads torch: 3 s of CPU and 340 MiB that rollouts and checks of a task can do without.
    if folder is not None and (name := _class_without_torch(folder)):
        return getattr(transformers, name).from_pretrained(model_path, local_files_only=local_files_only)
    return transformers.AutoTokenizer.from_pretrained(
        model_path, trust_remote_code=trust_remote_code, local_files_only=local_files_only
    )


def _class_without_torch(folder: Path) -> str | None:
    """The class that `AutoTokenizer` would choose, where that is sure; None elsewhere, and for damaged files."""
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=_TokenizerConfig)
        if config.tokenizer_class in _GENERIC_CLASSES:
            return "PreTrainedTokenizerFast"
        model = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    name = (config.tokenizer_class or "").removesuffix("Fast")
    return name if (model.model_type, name) in _NAMED_CLASSES and config.auto_map is None else None


class ChatRenderer:
    """Renders chats with `tokenizer`, a Hugging Face tokenizer with a chat template. Thread-safe.

    Encodes with a private copy of the fast tokenizer, so that nothing else changes its truncation or padding. A
    tokenizer without a fast backend is used under a lock.

    Args:
        template_kwargs: further arguments of its chat template (`llm.chat_template_kwargs`).
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] = {}) -> None:
        self.tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs)
        self._lock = threading.Lock()
        self._fast: Tokenizer | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            self._fast = Tokenizer.from_str(backend.to_str())
            self._fast.no_truncation()
            self._fast.no_padding()
        self._rendered: OrderedDict[str, tuple[str, list[int]]] = OrderedDict()

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, list[int]]:
        """Return prompt text and prompt ids for `messages`, ready for the assistant's turn.

        Raises:
            RolloutError: `bad_prompt` if the chat template rejects these messages.
        """
        try:
            msgspec.json.encode((messages, tools))  # plain data, so its `repr` identifies it
        except (TypeError, ValueError):
            text = self.render_text(messages, tools)
            return text, self.encode(text)
        key = repr((messages, tools))
        with self._lock:
            found = self._rendered.get(key)
        if found is None:
            text = self.render_text(messages, tools)
            found = text, self.encode(text)
            with self._lock:
                self._rendered[key] = found
                if len(self._rendered) > _CACHED_PROMPTS:
                    self._rendered.popitem(last=False)
        return found[0], list(found[1])

    def render_text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
    ) -> str:
        """Return the prompt text for `messages`.

        If the template does not know the role `developer`, it becomes `system`: templates drop unknown roles.

        Args:
            add_generation_prompt: open the assistant's turn at the end; None: continue the last message if it is the
                assistant's, else open a turn.

        Raises:
            RolloutError: `bad_prompt`, as in `render`.
        """
        continued = add_generation_prompt is None and is_begun(messages[-1:])
        opens = add_generation_prompt is not False and not continued
        turn = {"add_generation_prompt": opens, **({"continue_final_message": True} if continued else {})}
        turn = {**self._template_kwargs, **turn}
        chat = list(messages)
        if "developer" not in str(getattr(self.tokenizer, "chat_template", "")):
            chat = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in chat]
        try:
            return str(self.tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **turn))
        except Exception as error:  # the template is a program that ships with the model: anything can come out
            if not getattr(self.tokenizer, "chat_template", True):
                raise RolloutError(
                    "bad_prompt",
                    "the prompt is a list of messages, but the model's tokenizer has no chat template. Use an "
                    "instruction-tuned model, add a chat_template.jinja to the model folder, or pass token ids "
                    "(Prompt(token_ids=...))",
                ) from error
            raise RolloutError("bad_prompt", f"the chat template rejected the messages: {error}") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt without a chat template: `encode`, after the beginning-of-text token.

        The token is added if the tokenizer itself would add it, and only once.

        Raises:
            RolloutError: `bad_prompt`, as in `encode`.
        """
        ids, first = self.encode(text), getattr(self.tokenizer, "bos_token_id", None)
        if first is None or ids[:1] == [first]:
            return ids
        # An empty text shows what the tokenizer adds.
        if self._fast is not None:
            added = self._fast.encode("", add_special_tokens=True).ids
        else:
            with self._lock:
                added = list(self.tokenizer.encode("", add_special_tokens=True))
        return [first, *ids] if added[:1] == [first] else ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Special tokens in the text are recognized, none are added.

        Raises:
            RolloutError: `bad_prompt` for text without a UTF-8 form (a lone surrogate).
        """
        if self._fast is not None:
            return self._encode_fast(text).ids
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of `text` after `before`.

        Some tokenizers encode the first word of a text differently from the same word in the middle.
        """
        if self._fast is None or not text:
            return self.encode(text)
        context = before[-_CONTEXT_CHARACTERS:]
        encoding = self._encode_fast(context + text)
        boundary = len(context)
        first = next((i for i, (start, _) in enumerate(encoding.offsets) if start >= boundary), None)
        if first is None or any(end > boundary for _, end in encoding.offsets[:first]):
            return self.encode(text)  # a token spans the boundary: encode the text by itself
        return list(encoding.ids[first:])

    def _encode_fast(self, text: str) -> Encoding:
        assert self._fast is not None
        try:
            return self._fast.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise RolloutError("bad_prompt", f"the prompt has no UTF-8 form: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids beyond the vocabulary (padded embedding rows) are skipped."""
        if self._fast is not None:
            return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        with self._lock:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` skips this id: end of message, padding, and the like."""
        return not self.decode([token_id]) and bool(self.decode([token_id], skip_special_tokens=False))


@dataclass(slots=True)
class Prompt:
    """A chat (`messages` in OpenAI format, with optional `tools`), or `token_ids`, sent as they are."""

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

    `output_token_ids` and `logprobs` (natural logs, of the sampling distribution) have one entry per sampled token;
    `version_spans` cover them without gaps. Ids are the server's own, never re-tokenized text. `temperature` is that of
    the request.
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
    temperature: float | None = None

    @property
    def graded_text(self) -> str:
        """The answer as graders read it, beginning with `<think>` if the prompt ended with it."""
        return opened_thinking(self.prompt_text) + (self.output.content or "")

    @property
    def prompt_length_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_length_tokens(self) -> int:
        return len(self.output_token_ids)


def sampled_text(renderer: ChatRenderer, call: LLMCall) -> str:
    """Return the answer as a template would write it: with special tokens, except the one that ended it."""
    ids = call.output_token_ids
    if ended_by_token(renderer, call):
        ids = ids[:-1]
    return renderer.decode(ids, skip_special_tokens=False)


def ended_by_token(renderer: ChatRenderer, call: LLMCall) -> bool:
    """Return whether the last sampled id is a special token that ended the answer (no stop string, no limit)."""
    ended = call.finish_reason == "stop" and not call.ended_by_stop_string
    return ended and renderer.is_special(call.output_token_ids[-1])


def is_begun(last: Sequence[dict[str, Any]]) -> bool:
    """Return whether the last message is an answer that the model is to continue."""
    return any(each.get("role") == "assistant" and each.get("content") and not each.get("tool_calls") for each in last)


def after_thinking(text: str) -> str:
    """Return what a model states: the text after its last `</think>`, without unfinished thoughts."""
    return text.rpartition(THOUGHT)[2].partition(THINK)[0]


def opened_thinking(prompt_text: str | None) -> str:
    """Return the `<think>` at the end of a prompt, where templates of reasoning models may put it; else nothing."""
    return THINK if prompt_text is not None and prompt_text.rstrip().endswith(THINK) else ""


def cut_at(text: str, stop: str) -> str:
    """Return `text` up to the last occurrence of `stop`, the one that ended the output."""
    index = text.rfind(stop)
    return text if index < 0 else text[:index]
