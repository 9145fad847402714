"""From the settings of one server to the command line of vLLM's OpenAI server, what is refused on the way, and what
vLLM decides by itself.

No torch, no vllm: the launcher checks options before anything starts.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from pipelinerl.config.resources import share_of
from pipelinerl.errors import ConfigError

#: How vLLM starts the processes of a server, and to which cores it binds their threads on a CPU.
START_METHOD_KEY, BINDING_KEY, UNBOUND = "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "nobind"
#: Name of our transfer engine inside the server (`inference.transfer`).
ENGINE_NAME = "pipelinerl"
#: Name under which every server offers its model.
SERVED_MODEL_NAME = "actor"

SCHEDULER_PATH = "pipelinerl.inference.engine.create_scheduler"
WORKER_EXTENSION_PATH = "pipelinerl.inference.engine.WeightUpdateExtension"
MIDDLEWARE_PATH = "pipelinerl.inference.server.ServerMiddleware"

_OVERRIDES = "hf-overrides"
_SHARE = "gpu-memory-utilization"
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
    **dict.fromkeys(("nnodes", "node-rank", "headless"), "a server cannot span two nodes"),
}

#: `1` in a server's environment: it holds the frozen base model, and updates bring an adapter.
ADAPTER_VARIABLE = "PIPELINERL_SERVED_ADAPTER"
#: The ranks that vLLM allocates for (`vllm/config/lora.py`, version 0.32).
ROOM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: vLLM (0.32) makes a queue of 160 MiB for all workers of a server and one of 240 MiB for each, and refuses to start
#: if one of them does not fit; a page takes room once it is used.
QUEUE_BYTES = 241 * 2**20
#: Values of the option `dtype` but `auto`, as torch calls them.
_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
#: vLLM refuses them in float16 (`vllm/config/model.py`, version 0.32).
_NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
_SYNC = "finetune.lora.sync=adapter"
#: Options about adapters that do not change which one is served.
_FREE_OPTIONS = ("fully-sharded-loras",)
_EMBEDDINGS = (
    *("embed_tokens", "embed_positions", "embed_in", "embed_out", "word_embeddings", "position_embeddings"),
    *("lm_head", "wte", "wpe"),
)

# Variables of vLLM that say how a server computes, logs and caches on this machine: they are the operator's. The first
# part is what Kubernetes sets for a service, whatever its name.
_OPERATORS = re.compile(
    r"VLLM_(?!\w*(?:SERVICE|PORT)(?:_|$)|USE_MODELSCOPE$)"
    r"(?:(?:ALLREDUCE|B12X|BLOCKSCALE|BUILD|COMPILE|CONFIGURE|CPU|CUDA|DEBUG|DEEP|DEEPEP|DEEPEPLL|DISABLE|DISABLED|ENABLE"
    r"|FASTSAFETENSORS|FLASHINFER|GDN|GPU|HUMMING|KIMI|LOG|LOGGING|LORA_DISABLE|LORA_ENABLE|MARLIN|MEMORY_PROFILER|MOE|MQ"
    r"|MULTI_STREAM|MXFP4|MXFP8|NCCL|NVTX|ROCM|SHARED_EXPERTS|SKIP|SPARSE|SSM|TRITON|USAGE|USE|V1|WEIGHT_OFFLOADING"
    r"|WORKER|WSL2|XGRAMMAR|XLA|XPU|ZENTORCH)_\w+|ALLOW_LONG_MAX_MODEL_LEN|ASSETS_CACHE|ATTENTION_BACKEND|BATCH_INVARIANT|CACHE_ROOT"
    r"|COMPUTE_NANS_IN_LOGITS|CONFIG_ROOT|CUDART_SO_PATH|DO_NOT_TRACK|ENGINE_READY_TIMEOUT_S|EXECUTE_MODEL_TIMEOUT_SECONDS"
    r"|FLOAT32_MATMUL_PRECISION|IMAGE_TAG|KV_CACHE_LAYOUT|MAIN_CUDA_VERSION|MAX_TOKENS_PER_EXPERT_FP4_MOE"
    r"|MLA_DISABLE|NO_USAGE_STATS|PLUGINS|PP_LAYER_PARTITION|RAISE_ON_LOGIT_NANS|REPLICATE_EMBED"
    r"|RPC_BASE_PATH|SERVER_DEV_MODE|TARGET_DEVICE|TRACE_FUNCTION|TUNED_CONFIG_FOLDER)"
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
        on_cpu: it runs without a GPU.
        vllm_kwargs: options of vLLM's command line, names with dashes or underscores; `""`, `None` and `True` mean a
            bare flag, `False` its negation, a dict becomes JSON.
        seed: seed of the server's own randomness; requests carry seeds of their own.
        dtype: default of `--dtype`, used unless `vllm_kwargs` has it.
        fp32_head: compute the logits in fp32.
        can_sleep: it shares its GPU and has to be able to leave it.
        trust_remote_code: run code of the model's folder.
        adapter: the base model stays as it is, and updates bring an adapter; None: they bring the whole model.
    """

    model: str
    host: str
    port: int
    on_cpu: bool = False
    vllm_kwargs: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    dtype: str | None = None
    fp32_head: bool = False
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
    if (share := options.get(_SHARE)) is not None and share_of(share) is None:
        raise _error(_SHARE, share, "a number above 0, at most 1", "Use 0.9 for a GPU that nothing else uses.")
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
    if _installed_version() != _VLLM_VERSION:
        return
    for name in options:
        option = name.partition(".")[0]
        if option in VLLM_OPTIONS or option.removeprefix("no-") in VLLM_OPTIONS:
            continue
        near = get_close_matches(option, sorted(VLLM_OPTIONS), n=1)
        hint = f"Did you mean {near[0]}?" if near else "Remove it."
        raise _error(name, name, "an option of vLLM's server (`vllm serve --help=all`)", hint)


def foreign_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables of vLLM that a server of ours must not see: where it listens, who may call it and which model it serves
    is the run's decision. A Kubernetes service called `vllm` puts VLLM_PORT into every container of its namespace."""
    return sorted(name for name in environ if name.startswith("VLLM_") and not _OPERATORS.fullmatch(name))


def start_method(environ: Mapping[str, str], on_cpu: bool, numa_bind: bool) -> str:
    """How a server starts its engine and its workers: as the user chose, by default `fork`; `spawn` if memory or
    threads are bound, which vLLM does by a new process's command line and environment.

    Forked, they need not import vLLM again, which takes most of the time until a small model is served.
    """
    is_bound = numa_bind or (on_cpu and environ.get(BINDING_KEY) != UNBOUND)
    return "spawn" if is_bound else environ.get(START_METHOD_KEY) or "fork"


def _installed_version() -> str | None:
    """Of vLLM, whose build for CPUs has another name; without what follows a plus sign."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def named_dtype(vllm_kwargs: Mapping[str, object], default: str | None = None) -> str | None:
    """What the option `dtype` of the servers names, `default` without it; None: vLLM decides."""
    options = {name.strip().lstrip("-"): value for name, value in vllm_kwargs.items()}
    return _DTYPES.get(str(options["dtype"]).strip().lower()) if "dtype" in options else default


def automatic_dtype(checkpoint: str, model_type: str, has_bf16: bool = True) -> str:
    """What vLLM's `auto` is for a model whose configuration says `checkpoint`. fp32 is left to models that can be in
    no other type."""
    allowed = ["bfloat16"] if has_bf16 else []
    if model_type not in _NOT_IN_FLOAT16:
        allowed.append("float16")
    return checkpoint if checkpoint in allowed else (*allowed, "float32")[0]


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
        # vLLM takes dashes for underscores before the first dot only; a field of the option follows it.
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
    if settings.on_cpu:
        # A seeded request whose prompt is cut into chunks ends vLLM's engine on a CPU: CPU generators have no offset.
        defaults["enable-chunked-prefill"] = False
    if settings.can_sleep:
        defaults["enable-sleep-mode"] = True
    if settings.trust_remote_code:
        defaults["trust-remote-code"] = True
    if settings.dtype is not None:
        defaults["dtype"] = settings.dtype
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


#: The version of vLLM that has the options below.
_VLLM_VERSION = "0.32.0"
_VLLM_OPTION_TEXT = """
additional-config aggregate-engine-logging all2all-backend allow-credentials allow-deprecated-quantization
allowed-headers allowed-local-media-path allowed-media-domains allowed-methods allowed-origins
anthropic-disabled-thinking-effort api-key api-server-count async-scheduling attention-backend attention-config
aux-output-config block-size chat-template chat-template-content-format code-revision cohere-format
cohere-is-reasoning-model collect-detailed-traces compilation-config config config-format convert
cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params cudagraph-capture-sizes
cudagraph-metrics custom-histogram-buckets data-parallel-address data-parallel-backend data-parallel-external-lb
data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port
data-parallel-size data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port
dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate
decode-context-parallel-size default-chat-template-kwargs default-mm-loras device-ids device-memory-utilization
diffusion-config disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats
disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log distributed-executor-backend
distributed-timeout-seconds download-dir dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
dp-supervisor-probe-timeout-s dp-sync-interval dtype ec-manager-config ec-transfer-config elastic-ep-max-dp-size
enable-auto-tool-choice enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo
enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance
enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage enable-hc-sp
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details
enable-lora enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs
enable-per-request-metrics enable-prefix-caching enable-prompt-embeds enable-prompt-tokens-details
enable-request-id-headers enable-return-routed-experts enable-scale-out enable-server-load-tracking
enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint enable-tower-connector-lora
enable-trace-replay enforce-eager engram-config eplb-config exclude-tools-when-tool-choice-none
expert-placement-strategy fail-on-environ-validation fault-tolerance-config fingerprint-mode fingerprint-value
fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization grpc grpc-port h11-max-header-count
h11-max-incomplete-event-size headless help hf-config-path hf-overrides hf-token host ignore-patterns
interleave-mm-strings io-processor-plugin ir-op-priority jit-monitor-mode jit-monitor-verbose kda-decode-backend
kda-prefill-backend kernel-config kv-cache-dtype kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics
kv-cache-metrics-sample kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill
kv-transfer-config language-model-only limit-mm-per-prompt linear-backend load-format log-config-file log-error-stack
log-level logging-config logits-processors logprobs-mode long-prefill-token-threshold
long-prefill-token-threshold-adaptive lora-dtype lora-modules lora-target-modules mamba-backend mamba-block-size
mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr
master-port max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels max-lora-rank
max-loras max-model-len max-num-active-seqs max-num-batched-tokens max-num-queued-reqs max-num-queued-tokens
max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers media-io-kwargs middleware mm-device-do-normalize
mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs mm-shm-cache-max-object-size-mb
mm-tensor-ipc model model-class-overrides model-impl model-loader-extra-config moe-backend nnodes node-rank
num-gpu-blocks-override numa-bind numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group
offload-params offload-prefetch-step optimization-level otlp-traces-endpoint override-generation-config
per-request-spec-decode-metrics performance-mode pipeline-parallel-size pooler-config port prefill-context-parallel-size
prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config
pt-load-map-location quantization quantization-config ray-workers-use-nsight reasoning-config reasoning-parser
reasoning-parser-plugin renderer-num-workers replayssm-buffer-len response-role return-sampling-mask
return-tokens-as-token-ids revision root-path runner safetensors-load-strategy safetensors-prefetch-block-size
safetensors-prefetch-num-threads scheduler-cls scheduler-reserve-full-isl scheduling-policy seed served-model-name
show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling skip-tokenizer-init sleep-mode-offload-cudagraph
sleep-preserve-parameter-names sparse-indexer-topk-backend spec-method spec-model spec-tokens specialize-active-lora
speculative-config sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile
stream-interval structured-outputs-config swa-bounded-replay tensor-parallel-size tokenizer tokenizer-mode
tokenizer-revision tokens-only tool-call-parser tool-parser-plugin tool-server tool-strict-level trust-remote-code
trust-request-chat-template trust-request-mm-kwargs ubatch-size uds use-fp64-gumbel use-replayssm use-tqdm-on-load
uvicorn-log-level video-pruning-method video-pruning-rate watermark watermark-config weight-transfer-config worker-cls
worker-extension-cls
"""
#: Options of vLLM's server, without dashes in front and without the `no-` forms of flags, for processes that must not
#: import vLLM. They come from vLLM's own parser (`server.option_names`); a test compares the two.
VLLM_OPTIONS = frozenset(_VLLM_OPTION_TEXT.split())
