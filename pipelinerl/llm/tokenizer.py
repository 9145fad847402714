"""Loads the tokenizer of a model as its files say. Called by every process that needs one; reads files."""

from __future__ import annotations

from typing import Any

# Classes whose files are the whole truth. `AutoTokenizer` goes by the model's type instead: for a Qwen2 model with a
# tokenizer of its own it would keep the vocabulary and replace the rest by Qwen2's rules, without a word.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face tokenizer of the model folder or name `model_path`.

    Raises:
        OSError: there is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if get_tokenizer_config(model_path).get("tokenizer_class") in _GENERIC_CLASSES:
        return PreTrainedTokenizerFast.from_pretrained(model_path)
    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
