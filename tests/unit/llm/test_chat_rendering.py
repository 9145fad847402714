"""Chats to ids and back: template, cache, threads (T8), unknown ids (T7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "GPT2Tokenizer"),
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen2", "Qwen2TokenizerFast"),
        ("qwen3", "Qwen2Tokenizer"),
        ("llama", "PreTrainedTokenizerFast"),
        ("gemma2", "GPT2Tokenizer"),
        ("qwen2", "GPT2Tokenizer"),
    ],
)
def test_the_tokenizer_is_the_one_that_transformers_chooses(tmp_path: Path, model_type: str, name: str) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>", "<user>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the sum of 12 and 345 is 357", "it's the same, isn't it"], trainer)
    written = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE)
    written.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    chosen, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))

    assert type(ours) is type(chosen)
    for text in ("the sum of 12 and 345", "  isn't\n\nit<end> ", "<user>été 漢字 \u0301 1234567", "", "I'LL\t x"):
        assert ours(text) == chosen(text), text
        ids = ours.encode(text)
        assert ours.decode(ids) == chosen.decode(ids)
    assert (ours.eos_token_id, ours.chat_template) == (chosen.eos_token_id, chosen.chat_template)
    assert ours.all_special_ids == chosen.all_special_ids
    assert ours.apply_chat_template(user("it"), tokenize=False) == chosen.apply_chat_template(
        user("it"), tokenize=False
    )


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_known_tokenizers_load_without_torch(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    cached = tmp_path / "hub" / "models--some--model"
    folder = cached / "snapshots" / "0123"
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    code = f"""
import sys
from pipelinerl.llm.tokens import load_tokenizer
ours = [load_tokenizer(model) for model in ({str(folder)!r}, "some/model")]
print([type(each).__name__ for each in ours], len(ours[0]) == len(ours[1]))
try:
    load_tokenizer("some/other", local_files_only=True)
except OSError:
    print("torch" in sys.modules)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    kinds = [name.replace("PreTrainedTokenizerFast", "TokenizersBackend")] * 2
    assert done.stdout.splitlines() == [f"{kinds} True", "False"], done.stderr
