"""Peak memory of trainer ranks and servers, by part: the configuration becomes records, and records become bytes.

What a trainer rank holds (P values trained by N ranks): fp32 master weights 4 P, AdamW's two moments 8 P, gradients
4 P (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1, but with fp32 gradients), and what rounded weights lack
(`finetune/served_weights.py`). ZeRO and FSDP divide what their stage shards by N.

Activations are counted tensor by tensor, as autograd keeps them for one decoder layer of transformers under autocast
(Korthikanti et al. 2022, arXiv 2205.05198, count GPT's the same way); see `layer_bytes`. With checkpointing only the
input of each layer stays, and one layer is whole at a time. The head never holds more than a few chunks of logits
(`finetune/policy.py`).

A step has several moments at which memory may peak: the head's backward pass, a layer's, the end of the forward pass,
the optimizer. The forecast is the highest one; its parts are those of that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipelinerl.config import RunConfig
from pipelinerl.config.load import read_deepspeed_file
from pipelinerl.config.resources import DeepSpeedSettings, FSDPSettings
from pipelinerl.world.model_shape import ModelShape

GIB = 2**30
MIB = 2**20

Sharding = Literal["plain", "fsdp", "zero1", "zero2", "zero3"]

WEIGHTS, COPIES, RESTS = "master weights", "weights in 16 bits", "rounding remainders"
GRADIENTS, OPTIMIZER, STEP = "gradients", "optimizer state", "optimizer step"
ACTIVATIONS, LOGITS, REFERENCE = "activations", "logits and head", "reference model"
GATHERED, CACHE, CONTEXT, WORK = "gathered layers", "KV cache", "CUDA", "work space"
SERVED, GRAPHS, BUFFERS, PROCESS = "servers' weights", "CUDA graphs", "update buffers", "processes"
FRAGMENTS = "fragments"

#: Room that a shared token takes in a packed row: it is computed once, and for every further sample varlen attention
#: keeps only keys and values, at most an eighth of what a computed token keeps (`layer_bytes`).
SHARED_ROOM = 1 / 8
#: The buffer that an update travels in (`weights/buffers.py`).
_CHUNK_BYTES = 256 * MIB
#: CUDA's context and the kernels' code; the work space of cuBLAS (both measured on an H200).
_CONTEXT_BYTES, _WORK_SPACE = 0.74 * GIB, 0.08 * GIB
#: Memory that PyTorch's allocator holds and cannot use, as a share of what comes and goes (9 runs with expandable
#: segments, one H200; 0.06 and 0.8 GiB without them, and more where packs vary in length).
_FRAGMENTS = 0.015
#: PyTorch has no fp32 kernel for attention with fewer key-value heads: it keeps a matrix of weights for each sample,
#: and needs two more in the backward pass. Samples are shorter than the longest one.
_MEAN_LENGTH, _MATRICES_IN_BACKWARD = 0.8, 2
#: An idle trainer process without a GPU: Python, torch and transformers.
_TRAINER_PROCESS = 0.9 * GIB
#: Both processes of a vLLM server without a GPU: frontend and engine, which share what was loaded before the fork.
_SERVER_PROCESSES = 1.5 * GIB
#: Values that DeepSpeed keeps gathered at most (its default of `stage3_max_live_parameters`).
_ZERO3_LIVE = 10**9
#: DeepSpeed's default of `sub_group_size`.
ZERO3_SUB_GROUP = 10**9
_FP32_NAMES = ("float32", "float")


@dataclass(frozen=True)
class TrainerSetup:
    """One trainer rank of `ranks`, as the configuration has it.

    Attributes:
        products: dtype of the matrix products.
        served_bytes: of a weight in the servers.
        pack_tokens: computed in one micro-batch.
        shared_tokens: of other samples' shared prefixes in it, of which only keys and values are kept.
        gathered_bytes: of a parameter that FSDP gathers.
        longest: tokens of the longest sample.
        compiled: layers are compiled where they can be; see `is_compiled`.
        sub_group: values that the optimizer of ZeRO-3 handles at once, and the rest of the last matrix.
    """

    shape: ModelShape
    ranks: int = 1
    sharding: Sharding = "plain"
    products: Literal["bf16", "tf32", "fp32"] = "bf16"
    served_bytes: int = 2
    pack_tokens: int = 12000
    shared_tokens: int = 0
    checkpointing: bool = True
    chunk_tokens: int = 1024
    lora_rank: int = 0
    lora_matrices: int = 7
    reference: Literal["none", "device", "host"] = "none"
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    gathered_bytes: int = 4
    longest: int = 2048
    compiled: bool = True
    sub_group: int = ZERO3_SUB_GROUP
    on_cpu: bool = False

    @property
    def trained(self) -> int:
        """Values that the optimizer trains."""
        return self._adapters if self.lora_rank else self.shape.parameters

    @property
    def _adapters(self) -> int:
        """A and B of every matrix of a layer: rank times its two sides."""
        shape = self.shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_values // max(shape.layers, 1) // 2
        sides = 2 * (shape.hidden + width) + 2 * (shape.hidden + kv_width) + 3 * (shape.hidden + shape.intermediate)
        return round(self.lora_rank * shape.layers * sides * self.lora_matrices / 7)

    @property
    def shared_room(self) -> float:
        """The varlen attention needs 16-bit products and a GPU; others keep shared tokens in full."""
        return SHARED_ROOM if self.products == "bf16" and self.compiled and not self.on_cpu else 1.0

    @property
    def is_compiled(self) -> bool:
        """Whether layers are compiled, as `finetune/compiled_layers.py` decides."""
        is_dense = self.shape.active_matrices == self.shape.layer_matrices
        return self.products == "bf16" and self.sharding == "plain" and is_dense and self.compiled and not self.on_cpu

    @property
    def is_pure(self) -> bool:
        """Whether the module itself is in 16 bits, so that nothing is cast and the residual stream is narrow."""
        return self.products == "bf16" and (
            self.sharding.startswith("zero") or (self.sharding == "fsdp" and self.gathered_bytes == 2)
        )


@dataclass(frozen=True)
class Memory:
    """Bytes by part at the peak; `host` is in the machine's memory."""

    parts: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors(self) -> float:
        """Without what no tensor holds: CUDA's own, and what the allocator cannot use."""
        return self.reserved - self.parts.get(FRAGMENTS, 0.0)

    @property
    def reserved(self) -> float:
        """What PyTorch's allocator holds: everything but CUDA's own."""
        return self.total - self.parts.get(CONTEXT, 0.0) - self.parts.get(PROCESS, 0.0)

    @property
    def host_total(self) -> float:
        return sum(self.host.values())


def trainer_memory(setup: TrainerSetup) -> Memory:
    """The peak of one trainer rank."""
    held, host = _held(setup)
    peak = max((held | moment for moment in _moments(setup)), key=lambda parts: sum(parts.values()))
    if setup.on_cpu:
        peak = peak | {PROCESS: _TRAINER_PROCESS}
    else:
        moving = sum(peak.values()) - sum(held.values())
        peak = peak | {CONTEXT: _CONTEXT_BYTES + (0.35 * GIB if setup.ranks > 1 else 0), FRAGMENTS: _FRAGMENTS * moving}
    return Memory({name: size for name, size in peak.items() if size > 0}, host)


def least_memory(setup: TrainerSetup) -> float:
    """Bytes needed for any step, whatever the pack size: what is held, and the gradients."""
    held, _ = _held(setup)
    gradients = _gradients(setup)
    if setup.sharding.startswith("zero"):  # how DeepSpeed keeps them depends on its release
        gradients = min(gradients, 2 * setup.trained / setup.ranks)
    return sum(held.values()) + gradients + (0 if setup.on_cpu else _CONTEXT_BYTES)


def held_memory(setup: TrainerSetup) -> dict[str, float]:
    """What a rank holds on its device between steps."""
    return {**_held(setup)[0], CONTEXT: _CONTEXT_BYTES}


def _held(setup: TrainerSetup) -> tuple[dict[str, float], dict[str, float]]:
    """What a rank holds between steps, on its device and in the host's memory."""
    parts, host = _states(setup)
    if setup.reference != "none":
        (parts if setup.reference == "device" else host)[REFERENCE] = (
            (2 if setup.products == "bf16" else 4)
            * setup.shape.parameters
            / (setup.ranks if setup.sharding in ("fsdp", "zero3") else 1)
        )
    if not setup.on_cpu:
        parts[WORK] = _WORK_SPACE
    return parts, host


def _states(setup: TrainerSetup) -> tuple[dict[str, float], dict[str, float]]:
    """Weights and optimizer."""
    shape, share, host = setup.shape, 1 / setup.ranks, dict[str, float]()
    parts: dict[str, float]
    if setup.lora_rank:
        # Only embeddings and vectors of a frozen model stay wide (`lora.keep_products_exact`).
        wide = min(shape.embedding + shape.vectors, shape.parameters)
        narrow = shape.parameters - wide
        size = 2 if setup.products == "bf16" and setup.sharding != "fsdp" else 4
        sharded = share if setup.sharding in ("fsdp", "zero3") else 1
        parts = {WEIGHTS: (size * narrow + (2 if setup.is_pure else 4) * wide) * sharded + 4 * setup.trained}
        return parts | {OPTIMIZER: 8 * setup.trained}, host
    everything = shape.parameters
    if setup.sharding.startswith("zero"):
        copies = 2 if setup.products == "bf16" else 4
        parts = {COPIES: copies * everything * (share if setup.sharding == "zero3" else 1)}
        states = {WEIGHTS: 4 * everything * share, OPTIMIZER: 8 * everything * share}
        if setup.parameters_on_host:
            host[COPIES] = parts.pop(COPIES)
        (host if setup.optimizer_on_host else parts).update(states)
        if setup.optimizer_on_host:
            host[GRADIENTS] = 4 * everything * share
    else:
        sharded = share if setup.sharding == "fsdp" else 1
        parts = {WEIGHTS: 4 * everything * sharded, OPTIMIZER: 8 * everything * sharded}
        parts[RESTS] = 4 * _rounded(setup) * sharded
    return parts, host


def _rounded(setup: TrainerSetup) -> int:
    """Parameters that the trainer rounds to the servers' values itself (`served_weights.parameters_to_round`)."""
    shape = setup.shape
    if setup.served_bytes >= 4 or (setup.sharding == "fsdp" and setup.gathered_bytes == setup.served_bytes):
        return 0
    return shape.embedding + shape.vectors if setup.products == "bf16" else shape.parameters


def _gradients(setup: TrainerSetup) -> float:
    if setup.lora_rank:
        return 4 * setup.trained
    if setup.optimizer_on_host and setup.sharding in ("zero2", "zero3"):
        return 0
    sharded = setup.sharding in ("fsdp", "zero2", "zero3")
    return 4 * setup.shape.parameters / (setup.ranks if sharded else 1)


def _moments(setup: TrainerSetup) -> list[dict[str, float]]:
    """What is added to `_held` at each moment that may be the peak."""
    shape, tokens = setup.shape, setup.pack_tokens
    gradients = {GRADIENTS: _gradients(setup)}
    width = 2 if setup.products == "bf16" else 4
    shared = setup.shared_tokens * shape.kv_values / (max(shape.layers, 1) if setup.checkpointing else 1)
    activations = tokens * activation_bytes(setup) + width * shared
    layer = tokens * layer_bytes(setup)
    matrices = _MATRICES_IN_BACKWARD * tokens * _attention_matrix(setup)
    # Under autocast weights are cast once a forward pass; without checkpointing the backward pass still needs them.
    is_cast = setup.products == "bf16" and not setup.is_pure and not setup.lora_rank
    casts = 2 * shape.active_matrices if is_cast else 0
    largest = shape.layer_matrices / max(shape.layers, 1)
    gathered = _gathered(setup)
    one_layer = 0 if setup.lora_rank else (2 + 4) * largest  # its gradients in both dtypes
    inner = tokens * (4 * shape.intermediate * width / 2 + 6 * shape.hidden) + matrices
    last = tokens * 14 * shape.hidden  # gradients of the last norm and of what the head saw
    # The gradient of a tied head waits for that of the embedding.
    tied = 4 * shape.embedding if shape.tied and not setup.lora_rank else 0
    in_head, in_layers = (0, 0) if setup.checkpointing else (casts, tied)
    passes = {**gradients, **gathered}
    moments: list[dict[str, float]] = [
        {**passes, ACTIVATIONS: activations + last, LOGITS: _head_bytes(setup), COPIES: in_head},
        {**passes, ACTIVATIONS: activations + inner, COPIES: casts, LOGITS: in_layers},
        {**gradients, STEP: _step_bytes(setup)},
        {BUFFERS: min(3 * max(_CHUNK_BYTES, setup.served_bytes * shape.embedding), 2 * shape.weight_bytes())},
    ]
    if setup.checkpointing:
        copies = casts / shape.layers + one_layer
        moments.append({**passes, ACTIVATIONS: activations + layer + inner, COPIES: copies, LOGITS: tied})
    if setup.is_pure:  # the weights that are held are those of the products
        moments = [{name: size for name, size in moment.items() if name != COPIES} for moment in moments]
    return moments


def activation_bytes(setup: TrainerSetup) -> float:
    """Bytes of a token that stay until the backward pass of its micro-batch."""
    shape = setup.shape
    residual = 2 if setup.is_pure else 4
    width = 2 if setup.products == "bf16" else 4
    end = (2 * 4 + 2 * width) * shape.hidden  # last residual, final norm, and the rows that the head sees
    if setup.checkpointing:
        return shape.layers * residual * shape.hidden + end
    return shape.layers * layer_bytes(setup) + end


def layer_bytes(setup: TrainerSetup) -> float:
    """Bytes of a token that autograd keeps of one decoder layer.

    Norms keep their input and the normalized values in fp32. Under autocast each linear layer keeps a cast copy of its
    own; without it those with the same input share it. Attention keeps queries, keys, values, its result and one
    number a head. The gated layer keeps both branches, the activation and the product.

    A compiled layer keeps its input in fp32, what each norm gives, the result of the matrix after attention, and of the
    gated layer both branches and the product; the rest it computes again.
    """
    shape = setup.shape
    width = 2 if setup.products == "bf16" else 4
    hidden, wide = shape.hidden, shape.heads * shape.head_dim
    kv_wide = shape.kv_values // max(shape.layers, 1)
    if setup.is_pure:
        norms = 2 * (4 + 2 + 2) * hidden
    elif setup.products == "bf16":
        norms = 2 * (4 + 4) * hidden + (3 + 2) * 2 * hidden
    else:
        norms = 2 * (4 + 4 + 4) * hidden
    if setup.is_compiled:
        norms = (4 + 3 * width) * hidden
    norms += 2 * 4  # the root of each one's mean square
    attention = width * (2 * wide + kv_wide) + 4 * shape.heads
    weights = _attention_matrix(setup)
    between = (3 if setup.is_compiled else 4) * width * shape.intermediate
    if setup.lora_rank:
        # Frozen norms do not keep their products; the matrix after attention gets a copy of its own.
        norms -= 0 if setup.is_compiled else 2 * 4 * hidden
        attention += width * wide
        between += 7 * width * setup.lora_rank
    return norms + attention + weights + between


def _attention_matrix(setup: TrainerSetup) -> float:
    """Bytes of a token's row of attention weights in one layer, if attention has no kernel that does without."""
    shape = setup.shape
    if setup.on_cpu or setup.products == "bf16" or shape.kv_heads == shape.heads:
        return 0
    return 4 * shape.heads * min(setup.longest, setup.pack_tokens) * _MEAN_LENGTH


def _head_bytes(setup: TrainerSetup) -> float:
    """The most that the chunked head holds in its backward pass (`finetune/policy.py`)."""
    shape = setup.shape
    chunk = min(setup.chunk_tokens, setup.pack_tokens) * shape.vocabulary
    is_16_bit = setup.products == "bf16"
    weight = 2 * shape.embedding if is_16_bit and not setup.is_pure and (shape.tied or not setup.lora_rank) else 0
    # Logits of a chunk, and their gradient, which on a CPU is in fp32 first.
    logits = (4 + (2 if is_16_bit and not setup.on_cpu else 4)) * chunk
    if setup.lora_rank:
        return weight + logits
    product = (4 * shape.embedding + 2 * chunk) if is_16_bit else 4 * chunk
    return weight + 4 * shape.embedding + max(logits, product)


def _gathered(setup: TrainerSetup) -> dict[str, float]:
    """Parameters that a sharded backend has whole for a while, with their gradients."""
    shape = setup.shape
    layer = shape.layer_matrices / max(shape.layers, 1)
    ends = shape.embedding * (1 if shape.tied else 2)
    if setup.sharding == "fsdp":
        return {GATHERED: setup.gathered_bytes * (2 * ends + 3 * layer) + 4 * layer}
    if setup.sharding == "zero3" and not setup.lora_rank:
        live = min(shape.parameters, _ZERO3_LIVE)
        return {GATHERED: 2 * live * (1 if setup.ranks > 1 or setup.parameters_on_host else 0) + 2 * layer}
    if setup.sharding in ("zero1", "zero2") and not setup.lora_rank:
        return {GATHERED: 2 * shape.parameters if setup.sharding == "zero1" else 2 * max(layer, shape.embedding)}
    return {}


def _step_bytes(setup: TrainerSetup) -> float:
    """What AdamW needs for itself: a root of the second moment of every value. ZeRO 2 and 3 also copy the gradients of
    their share, stage 3 of at most `sub_group_size` values at once."""
    if setup.optimizer_on_host:
        return 0
    values = setup.trained / (setup.ranks if setup.sharding != "plain" and not setup.lora_rank else 1)
    if setup.sharding == "zero3":
        return 8 * min(values, setup.sub_group + setup.shape.embedding / setup.ranks)
    return (8 if setup.sharding == "zero2" else 4) * values


@dataclass(frozen=True)
class ServerSetup:
    """One GPU of a server of `gpus` GPUs (or a server on a CPU).

    Attributes:
        share: of the card's memory that it may take (`gpu-memory-utilization`).
        cache_bytes: of its KV cache if that is set; None: what is left of its share.
        offloaded_bytes: of its weights that are in the machine's memory.
    """

    shape: ModelShape
    gpus: int = 1
    weight_bytes: float = 2
    kv_bytes: float = 2
    fp32_head: bool = True
    share: float = 0.9
    cache_bytes: float | None = None
    offloaded_bytes: float = 0
    max_tokens: int = 10000
    max_sequences: int = 256
    batched_tokens: int = 8192
    graphs: bool = True
    on_cpu: bool = False


def server_memory(setup: ServerSetup, card_bytes: float) -> Memory:
    """The peak of one card of a server. The KV cache takes what its share leaves, and may be below zero."""
    shape = setup.shape
    weights = least_of_server(setup)
    if setup.fp32_head and setup.weight_bytes == 2:
        weights += 2 * shape.embedding / setup.gpus
    if setup.on_cpu:
        cache = setup.cache_bytes if setup.cache_bytes is not None else GIB
        return Memory({SERVED: weights, CACHE: cache, PROCESS: _SERVER_PROCESSES}, {})
    rows = min(setup.max_sequences, setup.batched_tokens)
    work = setup.batched_tokens * (4 * shape.hidden + 4 * shape.intermediate / setup.gpus) * 2
    work += 3 * 4 * rows * shape.vocabulary
    parts = {SERVED: weights, WORK: work, BUFFERS: 2 * _CHUNK_BYTES, CONTEXT: _CONTEXT_BYTES}
    if setup.graphs:
        parts[GRAPHS] = 0.2 * GIB + 6 * MIB * shape.layers
    rest = setup.share * card_bytes - sum(parts.values())
    return Memory(parts | {CACHE: rest if setup.cache_bytes is None else setup.cache_bytes}, {})


def least_of_server(setup: ServerSetup) -> float:
    """Bytes of the weights on one of its cards."""
    return max(0.0, setup.weight_bytes * setup.shape.parameters / setup.gpus - setup.offloaded_bytes)


def cache_tokens(setup: ServerSetup, memory: Memory) -> float:
    """Tokens that the caches of a server's cards hold together."""
    return memory.parts[CACHE] * setup.gpus / max(setup.shape.kv_bytes(setup.kv_bytes), 1)


def trainer_setup(config: RunConfig, shape: ModelShape, ranks: int, on_cpu: bool) -> TrainerSetup:
    """The record of one trainer rank."""
    tuned, backend = config.finetune, config.backend
    products = ("fp32" if on_cpu else "bf16") if tuned.dtype == "auto" else tuned.dtype
    sharding: Sharding = "plain"
    optimizer_on_host = parameters_on_host = False
    sub_group = ZERO3_SUB_GROUP
    if isinstance(backend, DeepSpeedSettings):
        zero = read_deepspeed_file(backend.config)["zero_optimization"]
        stages: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
        sharding = stages[zero["stage"]]
        sub_group = int(zero.get("sub_group_size", sub_group))
        optimizer_on_host, parameters_on_host = (
            (zero.get(f"offload_{what}") or {}).get("device") == "cpu" for what in ("optimizer", "param")
        )
    elif isinstance(backend, FSDPSettings):
        sharding = "fsdp"
    named = config.vllm_config.option("dtype")[1]
    is_wide = str(named).lower() in _FP32_NAMES or (named is None and on_cpu)
    pack = tuned.seq_length if tuned.seq_packing else tuned.train_batch_size * longest_sample(config)
    of_rank = -(-tuned.samples_per_step * longest_sample(config) // max(ranks, 1))
    reference = config.uses_local_reference(config.has_reference_pool)
    is_own_copy = reference and not (tuned.lora.enabled and tuned.lora.bias == "none")
    return TrainerSetup(
        shape=shape,
        ranks=max(ranks, 1),
        sharding=sharding,
        products=products,
        served_bytes=4 if is_wide and products != "bf16" else 2,
        pack_tokens=min(pack, of_rank),
        checkpointing=tuned.gradient_checkpointing,
        chunk_tokens=tuned.logprob_chunk_tokens,
        lora_rank=tuned.lora.r if tuned.lora.enabled else 0,
        lora_matrices=len(tuned.lora.target_modules) or 7,
        reference=("host" if tuned.rl.reference_offload else "device") if is_own_copy else "none",
        optimizer_on_host=optimizer_on_host,
        parameters_on_host=parameters_on_host,
        gathered_bytes=2 if isinstance(backend, FSDPSettings) and backend.param_dtype == "bf16" else 4,
        longest=longest_sample(config),
        compiled=tuned.seq_packing and tuned.attn_implementation == "auto",
        sub_group=sub_group,
        on_cpu=on_cpu,
    )


def server_setup(config: RunConfig, shape: ModelShape, on_cpu: bool) -> ServerSetup:
    """The record of a server on one card, with the cache that the user chose."""
    vllm = config.vllm_config
    named = str(vllm.option("dtype")[1] or ("float32" if on_cpu else "auto")).lower()
    offloaded = vllm.option("cpu-offload-gb")[1]
    kv_dtype = str(vllm.option("kv-cache-dtype")[1] or "auto")
    weight_bytes: float = 4 if named in _FP32_NAMES else 2
    if (quantization := vllm.option("quantization")[1]) is not None:
        weight_bytes = 1 if "8" in str(quantization) else 0.5
    return ServerSetup(
        shape=shape,
        weight_bytes=weight_bytes,
        kv_bytes=1 if "fp8" in kv_dtype else max(weight_bytes, 2),
        fp32_head=config.fp32_lm_head,
        share=config.gpu_memory_share,
        cache_bytes=vllm.cpu_kv_cache_gib * GIB if on_cpu else vllm.number("kv-cache-memory-bytes"),
        offloaded_bytes=offloaded * GIB if isinstance(offloaded, int | float) and not on_cpu else 0,
        max_tokens=vllm.number("max-model-len") or shape.context or config.finetune.seq_length,
        max_sequences=vllm.number("max-num-seqs") or 256,
        batched_tokens=vllm.number("max-num-batched-tokens") or (2048 if on_cpu else 8192),
        graphs=not on_cpu and vllm.option("enforce-eager")[1] is None,
        on_cpu=on_cpu,
    )


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest possible sample."""
    served = config.vllm_config.number("max-model-len") or config.finetune.seq_length
    return min(served, config.finetune.seq_length)
