"""Which tokens the update probe compares: fixed text before the first step, samples of the batch afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelinerl.records import Sample

NUM_SEQUENCES = 4
MAX_TOKENS = 256
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Two numbers add up to 42; the first is 17, so the second is 25.",
    "To find a number between 1 and 100, guess the middle of what is left.",
)


def text_tokens(tokenizer: Any, vocabulary_size: int) -> list[list[int]]:
    """Token ids of a few fixed sentences; plain ids if the tokenizer makes too little of them."""
    encoded = [tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in _TEXTS]
    usable = [ids for ids in encoded if len(ids) >= 2 and len(set(ids)) > 1 and max(ids) < vocabulary_size]
    return usable or [[(7 * k + 3) % vocabulary_size for k in range(16)]]


def batch_tokens(samples: Sequence[Sample]) -> list[list[int]]:
    """Token ids of a few samples spread over the batch, cut to a length that costs nothing."""
    stride = max(1, len(samples) // NUM_SEQUENCES)
    chosen = [sample.input_ids[:MAX_TOKENS] for sample in samples[::stride]]
    return [ids for ids in chosen if len(ids) >= 2][:NUM_SEQUENCES]
