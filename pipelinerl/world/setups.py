"""The records of the forecast: what the keys of a configuration say about one trainer rank and one server."""

from __future__ import annotations

from pipelinerl.config import RunConfig
from pipelinerl.config.load import read_deepspeed_file
from pipelinerl.config.resources import DeepSpeedSettings, FSDPSettings
from pipelinerl.world.forecast import GIB, ZERO3_SUB_GROUP, ServerSetup, Sharding, TrainerSetup
from pipelinerl.world.model_shape import ModelShape

#: vLLM's default of `gpu-memory-utilization`.
_DEFAULT_SHARE = 0.9
_FP32_NAMES = ("float32", "float")


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
    share = vllm.option("gpu-memory-utilization")[1]
    offloaded = vllm.option("cpu-offload-gb")[1]
    kv_dtype = str(vllm.option("kv-cache-dtype")[1] or "auto")
    weight_bytes: float = 4 if named in _FP32_NAMES else 2
    if vllm.quantization:
        weight_bytes = 1 if "8" in vllm.quantization else 0.5
    return ServerSetup(
        shape=shape,
        weight_bytes=weight_bytes,
        kv_bytes=1 if "fp8" in kv_dtype else max(weight_bytes, 2),
        fp32_head=config.fp32_lm_head,
        share=float(share) if isinstance(share, int | float) else _DEFAULT_SHARE,
        cache_bytes=vllm.cpu_kv_cache_gib * GIB if on_cpu else vllm.number("kv-cache-memory-bytes"),
        offloaded_bytes=offloaded * GIB if isinstance(offloaded, int | float) and not on_cpu else 0,
        max_tokens=vllm.number("max-model-len") or shape.context or config.finetune.seq_length,
        max_sequences=vllm.number("max-num-seqs") or 256,
        batched_tokens=vllm.number("max-num-batched-tokens") or (2048 if on_cpu else 8192),
        graphs=not on_cpu and vllm.option("enforce-eager")[1] is None,
        on_cpu=on_cpu,
    )


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest sample that can come."""
    served = config.vllm_config.number("max-model-len") or config.finetune.seq_length
    return min(served, config.finetune.seq_length)
