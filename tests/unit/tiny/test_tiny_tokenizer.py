"""The tiny model's tokenizer: short prompts, and every text back as it was."""

import unicodedata
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipelinerl.domains.guessing import turn_messages
from pipelinerl.tiny.tokenizer import build_tokenizer, number_token_ids

TOKENIZER = build_tokenizer(32)


def test_prompts_are_short_and_exact() -> None:
    for guesses, tokens in ((0, 11), (1, 18), (2, 20), (6, 28)):
        messages = turn_messages(1, 32, list(range(1, guesses + 1)), 4)
        text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert len(ids) == tokens
        assert TOKENIZER.decode(ids) == text
        assert text.endswith("<|end|><|assistant|>")


def test_an_answer_is_three_tokens_and_a_number_one() -> None:
    assert len(TOKENIZER.encode("<answer>17</answer>")) == 3
    assert TOKENIZER.encode("17") == [number_token_ids(TOKENIZER)[17]]
    assert sorted(number_token_ids(TOKENIZER)) == list(range(33))


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == unicodedata.normalize("NFC", text)


def test_special_tokens_and_template_survive_saving(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert (loaded.eos_token, loaded.pad_token, loaded.unk_token) == ("<|end|>", "<|pad|>", "<|unk|>")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|user|>hi<|end|><|assistant|><|end|>"
    ids = loaded.encode("<|user|>1<|end|>")
    assert len(ids) == 3 and loaded.decode(ids, skip_special_tokens=True) == "1"
