"""The table of byte-level tokenizers says what the tokenizer says, and is not used where it would not."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pipelinerl.llm.byte_text import byte_text
from pipelinerl.llm.chat import ChatRenderer
from pipelinerl.tiny.tokenizer import build_tokenizer

TEXTS = ["Hello, world!", "naïve café — 東京 🙂", "tabs\tand\nlines  ", "(1 + 2) * 3 = 9"]


def trained() -> Tokenizer:
    """A byte-level tokenizer of all bytes, some merges, special and other added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("東 京", special=False)])
    return tokenizer


def test_it_agrees_with_the_tokenizer_on_anything() -> None:
    tokenizer = trained()
    table = byte_text(tokenizer)
    assert table is not None
    rng = random.Random(0)
    size = tokenizer.get_vocab_size()
    sequences = [tokenizer.encode(text).ids for text in TEXTS]
    # Random bytes are broken UTF-8 of every kind; some ids are beyond the vocabulary.
    sequences += [[rng.randrange(size + 3) for _ in range(rng.randrange(60))] for _ in range(2000)]
    for ids in sequences:
        for skip in (True, False):
            assert table.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert table.decode(sequences[1], skip_special_tokens=True) == TEXTS[1]


def test_special_tokens_are_left_out_on_request() -> None:
    tokenizer = trained()
    table = byte_text(tokenizer)
    end, think = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<think>")
    assert table is not None
    assert table.decode([think, end], skip_special_tokens=True) == "<think>"
    assert table.decode([think, end], skip_special_tokens=False) == "<think><|end|>"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_other_tokenizers_have_no_table(decoder: decoders.Decoder | None) -> None:
    tokenizer = trained()
    tokenizer.decoder = decoder
    assert byte_text(tokenizer) is None


def test_the_renderer_uses_it_and_counts_padded_rows_as_nothing() -> None:
    renderer = ChatRenderer(build_tokenizer(32))
    ids = renderer.encode("guess 7")
    assert renderer.decode([*ids, 10_000_000]) == renderer.decode(ids)
