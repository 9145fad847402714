"""Loads the tokenizer of a model as its files say. Called by every process that needs one; reads files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

# Classes whose files are the whole truth. `AutoTokenizer` goes by the model's type instead: for a Qwen2 model with a
# tokenizer of its own it would keep the vocabulary and replace the rest by Qwen2's rules, without a word.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class _Settings(msgspec.Struct):
    tokenizer_class: str | None = None


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """Return the Hugging Face tokenizer of the model folder or name `model_path`.

    With `local_files_only` nothing is downloaded.

    Raises:
        OSError: there is none.
    """
    # Read here, since importing AutoTokenizer takes seconds and 300 MiB, which small models can do without.
    settings = Path(model_path) / "tokenizer_config.json"
    if settings.is_file() and _class_name(settings) in _GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_path, trust_remote_code=trust_remote_code, local_files_only=local_files_only
    )


def _class_name(settings: Path) -> str | None:
    """Return the class that a `tokenizer_config.json` names; a damaged file names none."""
    try:
        return msgspec.json.decode(settings.read_bytes(), type=_Settings).tokenizer_class
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
