"""Checks of `model_path` before anything starts: whether the model is complete, and whether the servers can run it as
configured. Reads small files and the headers of weight files, never the weights.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelinerl.commands import typed
from pipelinerl.config import RunConfig
from pipelinerl.config.load import ADAPTER_START
from pipelinerl.errors import ConfigError
from pipelinerl.inference.arguments import ROOM_RANKS, check_adapter_options, check_options
from pipelinerl.weights.manifest import read_header, read_manifest
from pipelinerl.world.model_shape import ModelShape, guess_shape, shape_of

#: Any of these may be the tokenizer, depending on the family of the model.
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
_CHAT_TEMPLATES = (
    *("chat_template*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("tokenization_*.py", "tekken.json"),  # may format chats in code
)
_JSON_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_LFS_POINTER = b"version https://git-lfs"
_MAX_NAMED = 3
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_HUB_TIMEOUT_S = 10.0
_LONGER_IS_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_COPY_AGAIN = "Copy or download the model again."
_MODEL_HELP = (
    f"Correct model_path. `{typed('tiny-model')}` builds a tiny model for CPUs, for configurations based on "
    "base_cpu (or quickstart)."
)


def check_model(config: RunConfig, may_ask_hub: bool = True) -> list[str]:
    """Refuse a model that is neither a complete Hugging Face folder nor on the hub (or in its cache).

    Returns:
        Remarks. If possible, the `config.json` of a hub model is in the cache afterwards.

    Raises:
        ConfigError: with the file and what is wrong with it.
    """
    model_path, folder = config.model_path, Path(config.model_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
            words = f"{ADAPTER_START}={model_path} finetune.lora.enabled=true"
            raise _refusal(model_path, "a whole model; it is an adapter", f"Name its base model here, and set {words}.")
        if not (folder / "config.json").is_file():
            raise _refusal(model_path, f"a folder with a model; {folder / 'config.json'} is missing", _MODEL_HELP)
        _check_folder(folder, config)
        return _notes(folder, model_path)
    expected = "a folder with a Hugging Face model, or the name of one on the hub"
    if folder.exists() or not _HUB_NAME.fullmatch(model_path):
        raise _refusal(model_path, f"{expected}; there is no such folder", _MODEL_HELP)
    if not may_ask_hub:
        return [f"whether the hub has {model_path} was not checked (there is no such folder here)"]
    if (reason := _missing_on_hub(config)) is not None:
        raise _refusal(model_path, f"{expected}; no such folder, and the hub says: {reason}", _MODEL_HELP)
    return []


def count_parameters(model_path: str) -> int | None:
    """Number of parameters of a model folder; None if unknown without loading them."""
    try:
        tensors = read_manifest(Path(model_path).expanduser())
    except (OSError, ValueError, KeyError, TypeError):  # `check_model` says what is wrong
        return None
    return None if tensors is None else sum(map(math.prod, tensors.values()))


def read_shape(model_path: str) -> ModelShape | None:
    """Sizes of a model; None if unknown.

    They come from its `config.json`, local or in the hub's cache; the number of parameters from the headers of local
    weight files. Otherwise they are guessed from the name.
    """
    found = shape_of(read_model_config(model_path), count_parameters(model_path))
    return found or guess_shape(model_path)


def check_context(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Refuse `max-model-len` above the model's context length, unless vLLM's variable in `environ` allows it. vLLM
    itself would refuse only after its start."""
    key, _ = config.vllm_config.option("max-model-len")
    asked, longest = config.vllm_config.number("max-model-len"), _context_length(read_model_config(config.model_path))
    is_changed = config.vllm_config.option("hf-overrides")[1] is not None or environ.get(_LONGER_IS_ALLOWED) == "1"
    if asked is not None and longest is not None and asked > longest and not is_changed:
        expected = f"at most {longest}, the context length of {config.model_path} (see its config.json)"
        next_step = f"Set {key} to {longest} or less, and llm.parameters.max_tokens below that."
        raise ConfigError(key, asked, expected, f"{next_step} The sizes of base_cpu fit small models.")


def check_parallel_size(config: RunConfig) -> None:
    """Refuse a tensor parallel size that does not divide the model's attention heads."""
    size = config.vllm_config.number("tensor-parallel-size") or 1
    model = read_model_config(config.model_path)
    heads = model.get("num_attention_heads")
    if size == 1 or not isinstance(heads, int):
        return
    shared = model.get("num_key_value_heads") or heads
    # With more workers than key-value heads, workers share a head.
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and max(n, shared) % min(n, shared) == 0]
    if size not in fitting:
        also = "" if shared == heads else f", that fits its {shared} key-value heads"
        raise ConfigError(
            "vllm_config.vllm_kwargs.tensor-parallel-size",
            size,
            f"a divisor of {heads}, the number of attention heads of {config.model_path}{also}",
            f"Use one of {', '.join(map(str, fitting))}, or more servers (world.num_actor_llms).",
        )


def check_adapter(config: RunConfig, has_gpus: bool) -> None:
    """Refuse models and options that cannot serve `finetune.lora.sync=adapter` exactly."""
    if not config.finetune.lora.sends_adapter:
        return
    check_adapter_options(check_options(config.vllm_config.vllm_kwargs)[0])
    if (rank := config.finetune.lora.r) > ROOM_RANKS[-1]:
        expected = f"at most {ROOM_RANKS[-1]} (of vLLM) with finetune.lora.sync=adapter"
        raise ConfigError("finetune.lora.r", rank, expected, "Lower it, or set finetune.lora.sync=merged.")
    key, dtype = config.vllm_config.option("dtype")
    if has_gpus and str(dtype).lower() in ("float32", "float"):
        expected = "a 16-bit type with finetune.lora.sync=adapter: vLLM's adapter kernels on GPUs support nothing else"
        raise ConfigError(key, dtype, expected, "Use bfloat16, or set finetune.lora.sync=merged.")
    model, trouble = read_model_config(config.model_path), ""
    experts = [name for name, value in model.items() if "expert" in name and type(value) is int and value > 1]
    if "quantization_config" in model:
        trouble = "quantized: trainer and servers would dequantize it differently"
    elif experts:
        trouble = f"a mixture of experts ({experts[0]}={model[experts[0]]})"
    if trouble:
        raise ConfigError(
            "finetune.lora.sync",
            "adapter",
            f"merged for {config.model_path}, which is {trouble}",
            "Set finetune.lora.sync=merged.",
        )


def read_model_config(model_path: str) -> dict[str, Any]:
    """`config.json` of the text model; empty if missing or unreadable (its loader will complain)."""
    file = Path(model_path).expanduser() / "config.json"
    if not file.is_file() and _HUB_NAME.fullmatch(model_path):
        cached = _hub().try_to_load_from_cache(model_path, "config.json")
        file = Path(cached) if isinstance(cached, str) else file
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    text = content.get("text_config")
    return {**content, **text} if isinstance(text, dict) else content


def _context_length(model: dict[str, Any]) -> int | None:
    """Number of positions of a model; None if unknown, or if its rotary embedding is scaled.

    Not for type `dynamic`: vLLM (0.32) builds a table of `max_position_embeddings` positions and reads past its end.
    """
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    kinds = {part.get("rope_type") or part.get("type") or "default" for part in parts}
    if kinds - {"default", "dynamic"} or "model_max_length" in model:
        return None
    lengths = [model.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def _weight_readers(config: RunConfig) -> str:
    """What loads the weights of the model folder, in words; empty: nothing (servers with `load-format: dummy`)."""
    is_dummy = config.vllm_config.option("load-format")[1] == "dummy"
    servers = config.has_stage("actor_llm") or (config.has_stage("preprocessor_llm") and config.has_reference_pool)
    readers = ["servers"] if servers and not is_dummy else []
    if config.has_stage("finetune"):
        readers.append("a trainer whatever their load-format" if servers and is_dummy else "a trainer")
    return " and ".join(readers)


def _check_folder(folder: Path, config: RunConfig) -> None:
    """Refuse a folder if a file that the run loads is missing or truncated."""
    model_path = config.model_path
    for name in _JSON_FILES:
        _check_json(folder / name, model_path)
    if not _found(folder, _TOKENIZER_FILES):
        raise _refusal(
            model_path,
            f"a folder with model and tokenizer; {folder} has no tokenizer.json, tokenizer.model or vocabulary",
            "Copy the model's tokenizer files there (tokenizer.save_pretrained(folder) writes them).",
        )
    readers = _weight_readers(config)
    if not readers:
        return
    weights = _weight_files(folder, model_path)
    if not weights:
        expected = f"weights (*.safetensors or pytorch_model*.bin) in {folder}, which {readers} would load"
        is_adapter = bool(_found(folder, ("adapter_model*",)))
        adapter = " It holds a LoRA adapter: merge it into its base model first." if is_adapter else ""
        raise _refusal(model_path, expected, f"{_COPY_AGAIN}{adapter}")
    for file in weights:
        trouble = _pointer_trouble(file) or (_truncated(file) if file.suffix == ".safetensors" else None)
        if trouble is not None:
            raise _broken(file, model_path, trouble)


def _notes(folder: Path, model_path: str) -> list[str]:
    """Only a remark on a missing chat template: whether it is needed depends on the task's prompts."""
    settings = folder / "tokenizer_config.json"
    in_settings = settings.is_file() and json.loads(settings.read_bytes()).get("chat_template")
    if in_settings or _found(folder, _CHAT_TEMPLATES):
        return []
    note = f"the tokenizer of {model_path} has no chat template: prompts that are lists of messages will be refused"
    return [f"{note}. Use an instruction-tuned model for a chat task"]


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [file for pattern in patterns for file in sorted(folder.glob(pattern))]


def _weight_files(folder: Path, model_path: str) -> list[Path]:
    """The weight files that an index names, or else all of them."""
    for index in _found(folder, _INDEXES):
        _check_json(index, model_path)
        names = sorted(set(json.loads(index.read_bytes()).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            named = ", ".join(missing[:_MAX_NAMED]) + (", ..." if len(missing) > _MAX_NAMED else "")
            trouble = f"it names {len(names)} files, of which {len(missing)} are missing: {named}"
            raise _broken(index, model_path, trouble)
        if names:
            return [folder / name for name in names]
    return [file for file in _found(folder, _WEIGHT_FILES) if not file.name.startswith("adapter_")]


def _check_json(file: Path, model_path: str) -> None:
    if not file.is_file():
        return
    trouble = _pointer_trouble(file)
    if trouble is None:
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                trouble = "it is not a JSON object"
        except ValueError as error:
            trouble = f"it is not valid JSON, perhaps truncated ({error})"
    if trouble is not None:
        raise _broken(file, model_path, trouble)


def _pointer_trouble(file: Path) -> str | None:
    with file.open("rb") as content:
        head = content.read(len(_LFS_POINTER))
    if head == _LFS_POINTER:
        return "it is a Git LFS pointer, not the file itself (`git lfs pull` fetches it)"
    return None if head else "it is empty"


def _truncated(file: Path) -> str | None:
    """Why the size of a safetensors file does not fit its header, which says where each tensor ends."""
    try:
        start, header = read_header(file)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"its header is truncated, or it is not a safetensors file ({error})"
    size, expected = file.stat().st_size, start + max(ends, default=0)
    return None if size == expected else f"it has {size} bytes, its header says {expected}: it is truncated"


def _missing_on_hub(config: RunConfig) -> str | None:
    """Why the hub does not have the model; None if it does."""
    name, hub = config.model_path, _hub()
    cached, is_offline = hub.try_to_load_from_cache(name, "config.json"), hub.constants.HF_HUB_OFFLINE
    if isinstance(cached, str):
        if is_offline:  # nothing can be downloaded
            _check_folder(Path(cached).parent, config)
        return None
    if is_offline:
        return "not in the local cache, and HF_HUB_OFFLINE is set"
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - any failure is an answer
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    # For the checks that read it. Without it the servers report what is wrong.
    with contextlib.suppress(Exception):
        hub.hf_hub_download(name, "config.json", etag_timeout=_HUB_TIMEOUT_S)
    return None


def _hub() -> Any:
    """Loaded late: only hub models need it."""
    return importlib.import_module("huggingface_hub")


def _broken(file: Path, model_path: str, trouble: str) -> ConfigError:
    return _refusal(model_path, f"a folder with a complete model; {file}: {trouble}", _COPY_AGAIN)


def _refusal(model_path: str, expected: str, next_step: str) -> ConfigError:
    return ConfigError("model_path", model_path, expected, next_step)
