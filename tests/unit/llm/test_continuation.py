"""The ids behind an answer: nothing that was written is dropped, and no ending is there twice."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pipelinerl.llm.chat import continuation, continue_ids, without_sampled_stop
from pipelinerl.llm.tokens import ChatRenderer, LLMCall, LLMOutput, Prompt
from pipelinerl.records import VersionSpan
from pipelinerl.tiny.tokenizer import build_tokenizer

MESSAGE = "<|{{ m['role'] }}|>{{ m['content'] }}"
START = "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
WITH_END = "{%- for m in messages -%}" + MESSAGE + "<|end|>{%- endfor -%}" + START
WITHOUT_END = "{%- for m in messages -%}" + MESSAGE + "{%- endfor -%}" + START
# Every message begins with the same special token, as in many templates, and nothing ends it.
ONE_START = (
    "{%- for m in messages -%}<|unk|>{{ m['role'] }}:{{ m['content'] }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|unk|>assistant:{%- endif -%}"
)
NO_LAST_ANSWER = (
    "{%- for m in messages -%}{%- if loop.last and m['role'] == 'assistant' -%}"
    "{{ raise_exception('who answers?') }}{%- endif -%}" + MESSAGE + "{%- endfor -%}" + START
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(32)


def call_of(tokenizer: Any, sampled: str, finish_reason: str = "stop", text: str | None = None) -> LLMCall:
    """A call whose sampled ids are those of `sampled`; with `text`, a stop string ended it."""
    ids = tokenizer.encode(sampled)
    visible = tokenizer.decode(ids, skip_special_tokens=True) if text is None else text
    return LLMCall(
        prompt=Prompt(token_ids=[1]),
        output=LLMOutput(content=visible),
        prompt_token_ids=[1],
        output_token_ids=ids,
        logprobs=[-0.5] * len(ids),
        finish_reason=finish_reason,
        version_spans=[VersionSpan(0, 0, len(ids))],
        prompt_text="",
        output_text=visible,
        ended_by_stop_string=text is not None,
    )


@pytest.mark.parametrize(
    ("sampled", "finish_reason", "text", "added"),
    [
        ("12<|end|>", "stop", "<|user|>7", "<|user|>7"),
        ("12<|end|>", "stop", "<|end|><|user|>7", "<|user|>7"),
        ("12<|pad|>", "stop", "<|end|><|user|>7", "<|end|><|user|>7"),
        ("12<|end|>", "length", "<|end|>7", "<|end|>7"),  # the limit was met at an end token that ended nothing
        ("12", "stop", "<|end|>7", "<|end|>7"),
        ("12<|end|>", "stop", "", ""),
    ],
)
def test_only_the_sampled_end_token_is_left_out(
    sampled: str, finish_reason: str, text: str, added: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    call = call_of(tokenizer, sampled, finish_reason)
    assert continue_ids(ChatRenderer(tokenizer), call, "12", text) == tokenizer.encode(added)


@pytest.mark.parametrize(
    ("template", "sampled", "tail", "added"),
    [
        # The template's end was sampled; another one stands in its place.
        (WITH_END, "12<|end|>", "<|end|><|user|>7<|end|><|assistant|>", "<|user|>7<|end|><|assistant|>"),
        (WITH_END, "12<|pad|>", "<|end|><|user|>7<|end|><|assistant|>", "<|user|>7<|end|><|assistant|>"),
        # The template has no end: what it begins with is the next message.
        (WITHOUT_END, "12<|pad|>", "<|user|>7<|assistant|>", "<|user|>7<|assistant|>"),
        (ONE_START, "12<|pad|>", "<|unk|>user:7<|unk|>assistant:", "<|unk|>user:7<|unk|>assistant:"),
        (NO_LAST_ANSWER, "12<|pad|>", "<|user|>7<|assistant|>", "<|user|>7<|assistant|>"),
        # No end was sampled: the template's is needed.
        (WITH_END, "12", "<|end|><|user|>7<|end|><|assistant|>", "<|end|><|user|>7<|end|><|assistant|>"),
    ],
)
def test_a_chat_leaves_out_what_the_template_ends_an_answer_with(
    template: str, sampled: str, tail: str, added: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    renderer = ChatRenderer(tokenizer)
    past = [{"role": "user", "content": "5"}]
    call = call_of(tokenizer, sampled, "stop" if sampled != "12" else "length")
    so_far = renderer.render_text(past) + "12"
    more = continuation(renderer, past, call, [{"role": "user", "content": "7"}], None, so_far)
    assert more == (tail, tokenizer.encode(added))


@pytest.mark.parametrize(
    ("sampled", "stop", "text", "added"),
    [
        ("ask</q>", ["</q>"], "</q> 7", " 7"),
        ("ask</q>", "</q>", "</q> 7", " 7"),
        ("ask</q>", ["</q>"], " 7", " 7"),
        ("ask</q>", ["</q>"], "</x> 7", "</x> 7"),
        # The last token went on behind the stop string.
        ("ask</q>.", ["x", "</q>"], "</q>. 7", " 7"),
        ("ask</q>.", ["x", "</q>"], "</q> 7", " 7"),
    ],
)
def test_a_stop_string_that_is_written_again_is_there_once(
    sampled: str, stop: Any, text: str, added: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    call = call_of(tokenizer, sampled, text="ask")
    assert without_sampled_stop(ChatRenderer(tokenizer), call, stop, text) == added


def test_text_behind_an_answer_without_a_stop_string_stays(tokenizer: PreTrainedTokenizerFast) -> None:
    assert without_sampled_stop(ChatRenderer(tokenizer), call_of(tokenizer, "12<|end|>"), ["7"], "7 7") == "7 7"
