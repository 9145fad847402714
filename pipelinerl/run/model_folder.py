"""Looks whether a model folder is whole: configuration, tokenizer, weights. Called by the checks before a run.

Reads small files and the heads of the weight files, never the weights. Waits for nothing else. Whether a chat template
is needed depends on the prompts of the task, so a missing one is a note (`notes_on_model`), not a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError

#: Any of them makes a tokenizer; which ones a model needs is its family's matter.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
    "tokenization_*.py",
)
_JSON_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_ADAPTER = "adapter_"
_LFS_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what the format allows
_COPY_AGAIN = "Copy or download the model again."
_MAX_NAMED = 3


def check_model_folder(folder: Path, model_path: str, weight_readers: str) -> None:
    """Refuse a folder in which something that every run loads is missing or was cut off.

    Args:
        folder: where the files are; it has a `config.json`.
        model_path: how the user calls it.
        weight_readers: who loads the weights, in words; empty: nobody, and they may be missing.

    Raises:
        ConfigError: names the file and what is wrong with it.
    """
    for name in _JSON_FILES:
        _check_json(folder / name, model_path)
    if not _found(folder, _TOKENIZER_FILES):
        raise ConfigError(
            "model_path",
            model_path,
            f"a folder with model and tokenizer; {folder} has no tokenizer (no tokenizer.json, tokenizer_config.json, "
            "tokenizer.model or vocabulary)",
            "Copy the tokenizer's files of the model there (tokenizer.save_pretrained(folder) writes them).",
        )
    if not weight_readers:
        return
    weights = _weight_files(folder, model_path)
    if not weights:
        adapter = " It holds a LoRA adapter: merge it into its base model first." if _adapters(folder) else ""
        raise ConfigError(
            "model_path",
            model_path,
            f"a folder with the weights of the model; {folder} has no *.safetensors and no pytorch_model*.bin; they "
            f"are loaded by {weight_readers}",
            f"{_COPY_AGAIN}{adapter}",
        )
    for file in weights:
        trouble = _pointer_trouble(file) or (_cut_off(file) if file.suffix == ".safetensors" else None)
        if trouble is not None:
            raise _broken(file, model_path, trouble)


def notes_on_model(folder: Path, model_path: str) -> list[str]:
    """What may be wrong with a model folder, depending on the task."""
    if not folder.is_dir() or not _found(folder, _TOKENIZER_FILES) or _has_chat_template(folder):
        return []
    return [
        f"the tokenizer of {model_path} has no chat template: prompts that are lists of messages will be refused. For "
        "a chat task use an instruction-tuned model, or put its chat_template.jinja into the folder"
    ]


def _has_chat_template(folder: Path) -> bool:
    if _found(folder, ("chat_template*.jinja", "chat_template.json", "additional_chat_templates/*.jinja")):
        return True
    if _found(folder, ("tokenization_*.py", "tekken.json")):
        return True  # it may write chats in code of its own
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_read_json(settings).get("chat_template"))


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [file for pattern in patterns for file in sorted(folder.glob(pattern))]


def _adapters(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_ADAPTER}model*"))


def _weight_files(folder: Path, model_path: str) -> list[Path]:
    """The files of the weights: those that an index names, or else all; an index whose files are not all there is
    refused."""
    for index in _found(folder, ("model.safetensors.index.json", "pytorch_model.bin.index.json")):
        _check_json(index, model_path)
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            named = ", ".join(missing[:_MAX_NAMED]) + (", ..." if len(missing) > _MAX_NAMED else "")
            trouble = f"it names {len(names)} files, of which {len(missing)} are missing: {named}"
            raise _broken(index, model_path, trouble)
        if names:
            return [folder / name for name in names]
    return [file for file in _found(folder, _WEIGHT_FILES) if not file.name.startswith(_ADAPTER)]


def _check_json(file: Path, model_path: str) -> None:
    if not file.is_file():
        return
    trouble = _pointer_trouble(file)
    if trouble is None:
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                trouble = "it holds no JSON object"
        except ValueError as error:
            trouble = f"it is no JSON text, perhaps cut off ({error})"
    if trouble is not None:
        raise _broken(file, model_path, trouble)


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    return content if isinstance(content, dict) else {}


def _pointer_trouble(file: Path) -> str | None:
    """Why the file is no content at all: it is empty, or stands for one that was never fetched."""
    with file.open("rb") as content:
        head = content.read(len(_LFS_POINTER))
    if head == _LFS_POINTER:
        return "it is a pointer of Git LFS, not the file itself (`git lfs pull` fetches it)"
    return None if head else "it is empty"


def _cut_off(file: Path) -> str | None:
    """Why the length of a safetensors file does not fit its head: 8 bytes with the length of a JSON text, that text
    with the end of each tensor, the tensors without gaps."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            return f"its head is cut off or it is no safetensors file ({size} bytes)"
        try:
            header = json.loads(content.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return f"its head cannot be read ({type(error).__name__}: {error})"
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    return None if size == expected else f"it has {size} bytes and its head says {expected}: it was cut off"


def _broken(file: Path, model_path: str, trouble: str) -> ConfigError:
    return ConfigError("model_path", model_path, f"a folder with a whole model; {file}: {trouble}", _COPY_AGAIN)
