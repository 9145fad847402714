"""Chats to ids and back: template, cache, threads (T8), unknown ids (T7)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipelinerl.errors import RolloutError
from pipelinerl.llm.tokens import ChatRenderer, cut_at, load_tokenizer

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<end>", "<user>", "<assistant>"]
    words = {word: index for index, word in enumerate(["?", *specials, "a", "b", "c"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="?", pad_token="?", chat_template=TEMPLATE
    )


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_no_message_is_lost_and_a_begun_answer_is_continued(tokenizer: PreTrainedTokenizerFast) -> None:
    """As Qwen's templates do, these leave out roles that they do not know."""
    known = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    tokenizer.chat_template = f"{known}<{{{{ m.role }}}}>{{{{ m.content }}}}<end>{{% endif %}}{{% endfor %}}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    chat = [{"role": "developer", "content": "Only JSON."}, *user("a")]
    assert renderer.render_text(chat) == "<system>Only JSON.<end><user>a<end><assistant>"
    begun = [*user("a"), {"role": "assistant", "content": "b c"}]
    assert renderer.render_text(begun) == "<user>a<end><assistant>b c"
    assert renderer.render_text(begun, add_generation_prompt=True) == "<user>a<end><assistant>b c<end><assistant>"


def test_a_plain_prompt_begins_as_the_tokenizer_begins_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    assert ChatRenderer(tokenizer).encode_prompt("a b") == [4, 5]
    tokenizer.bos_token = "<user>"
    assert ChatRenderer(tokenizer).encode_prompt("a b") == [4, 5]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<user> $A <end>", special_tokens=[("<user>", 2), ("<end>", 1)]
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.encode_prompt("a b") == renderer.encode_prompt("<user>a b") == [2, 4, 5]
    assert renderer.encode("a b") == [4, 5]


def test_template_and_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    assert renderer.render(user("a b")) == ("<user> a b <assistant>", [2, 4, 5, 3])
    tools = [{"type": "function", "function": {"name": "c"}}]
    assert renderer.render(user("a b"), tools)[1] == [6, 2, 4, 5, 3]


def test_arguments_of_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """`llm.chat_template_kwargs`; what the renderer itself decides on stays as it decided."""
    thinking = "{% if enable_thinking is false %}b{% endif %}"
    tokenizer.chat_template = TEMPLATE + thinking
    renderer = ChatRenderer(tokenizer, {"enable_thinking": False, "add_generation_prompt": False})
    assert renderer.render(user("a")) == ("<user> a <assistant>b", [2, 4, 3, 5])
    assert ChatRenderer(tokenizer).render(user("a"))[1] == [2, 4, 3]


def test_cached_chats_are_told_apart_and_belong_to_nobody(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    contents: list[Any] = ["a", "b", 1, True, None, [1], (1,), float("nan"), object()]
    texts = [renderer.render([{"role": "user", "content": content}])[0] for content in contents]
    assert texts == [renderer.render_text([{"role": "user", "content": content}]) for content in contents]
    first = renderer.render(user("a"))[1]
    expected = list(first)
    first.append(6)
    assert renderer.render(user("a"))[1] == expected
    assert renderer.render(user("a"), [{"function": {"name": "b"}}])[0] != renderer.render(user("a"))[0]


def test_decoding_leaves_out_special_and_unknown_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    assert renderer.decode([4, 5, 1]) == "a b"
    assert renderer.decode([4, 70_000, 5]) == "a b"
    assert renderer.decode([], skip_special_tokens=False) == ""


def test_a_refused_chat_fails_the_rollout(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RolloutError, match=r"bad_prompt.*no robots"):
        ChatRenderer(tokenizer).render([{"role": "robot", "content": "a"}])


def test_a_tokenizer_without_chat_template_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(RolloutError, match=r"bad_prompt.*no chat template"):
        ChatRenderer(tokenizer).render(user("a"))


def test_many_threads_at_once_while_the_user_changes_settings(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            tokenizer(["a b c", "a"], padding=True, truncation=True, max_length=2)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            lengths = set(
                pool.map(lambda index: len(renderer.render(user("a b c " * 5 + "a" * (index % 7)))[1]), range(400))
            )
    finally:
        stop.set()
        disturber.join()
    # 15 words, perhaps one more, and two role marks: nothing was truncated or padded.
    assert lengths == {17, 18}


def test_output_ends_before_its_stop_string() -> None:
    assert cut_at("x = 1;\nmore", "\n") == "x = 1;"
    assert cut_at("x = 1", "\n") == "x = 1"


def test_a_tokenizer_of_its_own_in_a_known_models_folder_is_loaded_as_it_is(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.backend_tokenizer.encode("a b").ids == [4, 5]
    assert loaded.chat_template == TEMPLATE
