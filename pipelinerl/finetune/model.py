"""Loads the model to train, selects its attention, and loads the frozen reference model of the KL term.

Models whose samples influence each other are detected by a trial (`model_check.py`), not by name; with
`finetune.seq_packing` they are rejected with the reason.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.attention import HALF_PRECISION_ONLY, candidate_implementations, register_own_attention
from pipelinerl.finetune.compiled_layers import can_compile, compile_layers
from pipelinerl.finetune.experts import use_own_experts
from pipelinerl.finetune.lora import adapters_off, add_adapters, has_adapters, keep_products_exact, sends_merged
from pipelinerl.finetune.model_check import (
    exact_fp32,
    far_difference,
    forward_difference,
    head_is_linear,
    low_thresholds,
    packing_difference,
    repeat_difference,
    rounding_difference,
    sharing_difference,
    tf32_difference,
)
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import RankFault, Ranks
from pipelinerl.finetune.served_weights import parameters_to_round, round_for_good, wire_dtype
from pipelinerl.finetune.sharded_model import (
    loaded_in_parts,
    shard_frozen,
    shards_weights,
    whole_for_trial,
    wide_for_trial,
)
from pipelinerl.rl.microbatch import MicroBatch

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
#: Largest difference of a deep or wide model in bf16, if rounding alone changes its plain logits that much.
_MOST_ROUNDING = 0.5
# Far above the effect of rounding to 10 bits, far below that of rounded positions.
_TF32_TOLERANCE = 0.1
#: Attributes of mixtures of experts that add noise to their inputs in training mode. Not `router_jitter_noise`, which
#: may be a threshold of the routing itself.
_NOISES = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
#: Rotary embeddings that choose their frequencies by the longest position of a row.
_ROW_ROPES = ("longrope", "dynamic")


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Dtype of matrix products: `finetune.dtype`, or (`auto`) fp32 on a CPU and bf16 on a GPU. TF32 counts as fp32."""
    wanted = config.finetune.dtype
    if wanted == "auto":
        wanted = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}[wanted]


def load_policy(config: RunConfig, device: torch.device, ranks: Ranks | None = None) -> PolicyModel:
    """Load `model_path` as a policy with fp32 parameters on `device`.

    With a sharding backend each of several `ranks` gets a part (`sharded_model.py`). All ranks select the same
    attention, or all raise.

    Raises:
        ConfigError: the model does not exist or cannot be trained as configured.
    """
    settings = config.finetune
    path = config.model_path
    dtype = compute_dtype(config, device)
    ranks = ranks or Ranks(device=device)
    served_length = config.vllm_config.number("max-model-len")
    register_own_attention()
    in_parts = ranks.world_size > 1 and shards_weights(config)
    # FSDP gathers the parameters of a layer together, so they need one dtype.
    one_dtype = config.backend.type == "fsdp" or in_parts
    is_narrow = settings.lora.enabled and settings.lora.bias == "none" and not one_dtype
    reasons: list[str] = []
    blamed: tuple[str, Any, str] = ("model_path", path, "Use another model.")
    if settings.attn_implementation != "auto":
        remedy = "Set finetune.attn_implementation=auto."
        blamed = ("finetune.attn_implementation", settings.attn_implementation, remedy)
    candidates = candidate_implementations(settings.attn_implementation, device, dtype)
    for attention in candidates:
        reason = None
        try:
            with loaded_in_parts(ranks) if in_parts else nullcontext():
                language_model = load_language_model(path, attention, settings.trust_remote_code, served_length)
        except (ImportError, ValueError, KeyError) as error:
            # Old models look up their attention in a table of their own.
            reason = _first_sentence(error)
        if (reason := ranks.first_fault(reason)) is not None:
            reasons.append(f"{attention}: {reason}")
            continue
        refuse_positions_beyond_dynamic(language_model.config.get_text_config(), served_length)
        if is_narrow:
            # Before it is on the device, which may lack room for it in fp32.
            keep_products_exact(language_model.requires_grad_(False), dtype)
        policy = PolicyModel(
            language_model,
            temperature=config.sampling_temperature,
            chunk_tokens=settings.logprob_chunk_tokens,
            fp32_head=config.fp32_lm_head,
            with_entropy=settings.rl.needs_entropy,
            with_values=settings.rl.uses_values,
            compute_dtype=dtype,
            tf32=settings.dtype == "tf32",
            served_dtype=wire_dtype(config, dtype, device, path),
            shares_prefixes=settings.share_prefixes and settings.seq_packing,
        ).to(device)
        try:
            with whole_for_trial(policy, ranks), wide_for_trial(policy):
                reason = find_fault(policy, settings.seq_packing, settings.train_batch_size, ranks)
                blamed = (cure(policy, config, ranks) if reason else None) or blamed
        except RankFault as error:
            reason = str(error)
        if reason:
            reasons.append(f"{attention}: {reason}")
            logger.warning("attention %s is not used: %s", attention, reason)
            # Free it before the next one is loaded.
            del policy, language_model
            gc.collect()
            continue
        if policy.tf32 and policy.fp32_head and not policy.has_linear_head:
            raise ConfigError(
                "finetune.dtype",
                "tf32",
                f"fp32 or bf16 for {path}: it scales or caps its logits in its own head, which would be in TF32 too",
                "Use finetune.dtype=fp32, or fp32_lm_head=false.",
            )
        if settings.lora.enabled:
            add_adapters(policy, settings.lora, path, one_dtype)
        products = "tf32" if policy.tf32 else dtype
        served = str(policy.served_dtype).removeprefix("torch.")
        line = "attention %s, products in %s, parameters in fp32, servers in %s, device %s"
        logger.info(line, attention, products, served, device)
        if settings.gradient_checkpointing:
            language_model.gradient_checkpointing_enable({"use_reentrant": False})
        if can_compile(policy, config):
            compile_layers(policy, settings.seq_length)
        return policy
    expected = f"a model that can be trained this way; {path} cannot ({'; '.join(dict.fromkeys(reasons))})"
    raise ConfigError(blamed[0], blamed[1], expected, blamed[2])


def _first_sentence(error: Exception) -> str:
    """Transformers' message about an unsupported attention, without its advice."""
    if isinstance(error, KeyError):
        return f"the family does not support {error}"
    return str(error).partition(" yet. Please")[0].partition("\n")[0]


def cure(policy: PolicyModel, config: RunConfig, ranks: Ranks) -> tuple[str, Any, str] | None:
    """Key, value and remedy, if another way to batch samples avoids the fault of a model."""
    settings = config.finetune
    if settings.seq_packing and find_fault(policy, False, settings.train_batch_size, ranks) is None:
        return "finetune.seq_packing", True, "Set finetune.seq_packing=false for this model."
    if settings.train_batch_size > 1 and find_fault(policy, False, ranks=ranks) is None:
        remedy = "Set finetune.train_batch_size=1 and finetune.seq_packing=false for this model."
        return "finetune.train_batch_size", settings.train_batch_size, remedy
    return None


def load_language_model(
    path: str, attention: str, trust_remote_code: bool = False, served_length: int | None = None
) -> PreTrainedModel:
    """The causal language model of `path` with fp32 parameters, in training mode, without dropout.

    Raises:
        ConfigError: `path` is neither a model folder nor a name that can be fetched, or not a language model.
        ValueError, ImportError, KeyError: the model does not support `attention`.
    """
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        kind = "an existing folder" if Path(path).is_absolute() or path.startswith(".") else "a folder or a known name"
        raise ConfigError(
            "model_path",
            path,
            f"{kind} with a Hugging Face model ({str(error).splitlines()[0]})",
            "If you trust its code, set finetune.trust_remote_code=true."
            if "trust_remote_code" in str(error)
            else "Check the path, or download the model first.",
        ) from error
    if type(model_config) not in AutoModelForCausalLM._model_mapping and not hasattr(model_config, "auto_map"):
        raise ConfigError(
            "model_path",
            path,
            f"a causal language model of text; {model_config.model_type!r} is none in transformers "
            f"(architectures: {', '.join(model_config.architectures or ['unknown'])})",
            "Use a model of text alone, for instance the language model of this family.",
        )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=model_config,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    leave_computed_buffers(model, loaded[1]["missing_keys"])
    remove_dropout(model)
    fix_frequencies(model, served_length)
    use_own_experts(model)
    model.train()
    return model


def leave_computed_buffers(model: torch.nn.Module, missing: Collection[str]) -> None:
    """Mark buffers that the checkpoint lacks as not persistent: servers compute them too, and do not know their names.

    Args:
        missing: names that the checkpoint lacks. Parameters among them are rejected when names are compared.
    """
    computed = sorted(name for name, _ in model.named_buffers() if name in missing)
    for name in computed:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._non_persistent_buffers_set.add(leaf)
    if computed:
        logger.warning("not in the checkpoint, so neither sent nor saved: %s", ", ".join(computed))


def remove_dropout(model: torch.nn.Module) -> None:
    """Disable dropout and router noise: the ratio of new to old log-probs must come from the weights alone."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            # `attention_dropout`, `resid_pdrop`, `layerdrop`, ...
            if isinstance(value, float) and ("drop" in name or name in _NOISES):
                setattr(module, name, 0.0)


def fix_frequencies(model: torch.nn.Module, served_length: int | None) -> None:
    """Fix rotary frequencies that depend on the longest position of a row to those of the servers.

    Otherwise a sample would depend on its neighbors in the row. vLLM (0.32) uses the long factors of `longrope` if its
    `max_model_len` exceeds the original length, and for `dynamic` the frequencies of `max_position_embeddings`, with
    which transformers starts.

    Args:
        served_length: `max_model_len` of the servers; None: vLLM's default, the original length if stated.
    """
    for module in model.modules():
        types: Any = getattr(module, "rope_type", None)
        settings: Any = getattr(module, "config", None)
        for layer_type, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
            if rope_type not in _ROW_ROPES:
                continue
            if rope_type == "longrope":
                buffer = module.get_buffer("inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
                default = getattr(settings, "original_max_position_embeddings", settings.max_position_embeddings)
                length = served_length or default
                fixed, _ = ROPE_INIT_FUNCTIONS[rope_type](settings, buffer.device, length, layer_type=layer_type)
                buffer.copy_(fixed)
            # A type that transformers does not recompute.
            if layer_type is None:
                setattr(module, "rope_type", "fixed")  # noqa: B010 - no tensor
            else:
                types[layer_type] = "fixed"


def refuse_positions_beyond_dynamic(config: Any, served_length: int | None) -> None:
    """Reject servers that accept more than the maximum of a model with `dynamic` frequencies.

    vLLM (0.32) multiplies the maximum by the factor, but has no frequencies there and reads out of bounds.

    Args:
        served_length: `max_model_len` of the servers; None: vLLM's default, which is too large.
    """
    settings = getattr(config, "rope_parameters", None) or {}
    each = [value for value in settings.values() if isinstance(value, dict)] or [settings]
    known = config.max_position_embeddings if any(rope.get("rope_type") == "dynamic" for rope in each) else math.inf
    if (served_length or math.inf) > known:
        raise ConfigError(
            "vllm_config.vllm_kwargs.max_model_len",
            served_length,
            f"at most {known}: vLLM has no frequencies of type dynamic beyond the model's max_position_embeddings",
            f"Set vllm_config.vllm_kwargs.max_model_len={known}, or less.",
        )


def find_fault(policy: PolicyModel, packed: bool, rows: int = 1, ranks: Ranks | None = None) -> str | None:
    """Why this model cannot be trained with this attention; None if it can. The same on all `ranks`.

    Args:
        policy: its `has_linear_head` and `shares_prefixes` are corrected.
        packed: samples share a row.
        rows: padded rows of a micro-batch, if not `packed`.
        ranks: all call it with their copy, or with their parts within `whole_for_trial`.
    """
    ranks = ranks or Ranks()
    wanted_dtype, wanted_tf32 = policy.compute_dtype, policy.tf32
    policy.tf32 = False
    try:
        with low_thresholds(policy):
            fault = _fault(policy, packed, rows) or _tf32_fault(policy, wanted_tf32)
    except RankFault as error:
        # Raised on all ranks.
        return str(error)
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        fault = f"{type(error).__name__}: {error}"
    finally:
        policy.compute_dtype, policy.tf32 = wanted_dtype, wanted_tf32
    if (fault := ranks.first_fault(fault)) is None:
        found = ranks.min([float(policy.has_linear_head), float(policy.shares_prefixes)])
        policy.has_linear_head, policy.shares_prefixes = found[0] > 0, found[1] > 0
    return fault


def _fault(policy: PolicyModel, packed: bool, rows: int) -> str | None:
    is_half_only = policy.attention in HALF_PRECISION_ONLY
    if not is_half_only:
        # In fp32 a leak cannot hide behind rounding.
        policy.compute_dtype = torch.float32
    tolerance, exact = _TOLERANCE[policy.compute_dtype], _TOLERANCE[torch.float32]
    if is_half_only:
        tolerance = max(tolerance, min(2 * rounding_difference(policy), _MOST_ROUNDING))
    policy.has_linear_head = policy.has_linear_head and head_is_linear(policy)
    if (difference := repeat_difference(policy)) > exact:
        return f"two passes over the same tokens differ by {difference:.2g}: it samples at random in training"
    if (difference := forward_difference(policy)) > tolerance:
        return f"log-probs differ by {difference:.2g} from the model's own logits"
    if not packed and rows == 1:
        return None
    what = "packed samples" if packed else "samples in padded rows"
    if (difference := packing_difference(policy, packed)) > tolerance:
        return f"{what} see each other (log-probs change by {difference:.2g})"
    with exact_fp32(policy):
        if is_half_only and (difference := packing_difference(policy, packed)) > exact:
            return f"{what} see each other (log-probs change by {difference:.2g})"
        if (difference := far_difference(policy, packed)) > exact:
            return f"a long sample changes how short ones beside it are computed (log-probs change by {difference:.2g})"
    _try_sharing(policy, packed, tolerance, exact)
    return None


def _try_sharing(policy: PolicyModel, packed: bool, tolerance: float, exact: float) -> None:
    """Compute equal prefixes for every sample if that is not the same as once."""
    if not (policy.shares_prefixes and packed):
        return
    rounded = exactly = sharing_difference(policy)
    if policy.attention in HALF_PRECISION_ONLY:
        with exact_fp32(policy):
            exactly = sharing_difference(policy)
    policy.shares_prefixes = rounded <= tolerance and exactly <= exact
    if not policy.shares_prefixes:
        line = "equal prefixes are computed for every sample: computed once, they change log-probs by %.2g (fp32 %.2g)"
        logger.info(line, rounded, exactly)


def _tf32_fault(policy: PolicyModel, is_wanted: bool) -> str | None:
    if is_wanted and (difference := tf32_difference(policy)) > _TF32_TOLERANCE:
        return f"TF32 products change its log-probs by {difference:.2g}; use finetune.dtype=fp32"
    return None


class ReferenceModel:
    """Log-probs under the frozen model, computed as the policy's: initially the two agree exactly in fp32.

    Args:
        model: a frozen copy, sharded or not, or the policy itself if it has adapters (which are disabled meanwhile).
        device: where micro-batches are computed.
        offload: keep an unsharded copy in CPU memory between steps.
    """

    def __init__(self, model: PolicyModel, device: torch.device, offload: bool = False) -> None:
        self._model = model
        self._device = device
        self._offload = offload and device.type != "cpu"
        if not has_adapters(model) and not isinstance(model, FSDPModule):
            model.requires_grad_(False)
            model.to("cpu" if self._offload else device)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of every micro-batch's targets at the sampling temperature: fp32, shape of the targets, on the CPU.

        For all micro-batches of a step at once, so that an offloaded model is moved once.
        """
        frozen: AbstractContextManager[None] = nullcontext()
        if has_adapters(self._model):
            frozen = adapters_off(self._model)
        elif self._offload:
            frozen = _on_device(self._model, self._device)
        with frozen:
            found = [self._model(*self._model.placed(batch, self._device)).logprobs.cpu() for batch in micro_batches]
        if isinstance(self._model, FSDPModule):
            # Without a backward pass nothing else does.
            self._model.reshard()
        return found


def load_reference(
    config: RunConfig, policy: PolicyModel, device: torch.device, has_servers: bool, ranks: Ranks | None = None
) -> ReferenceModel | None:
    """The reference model of the configuration; None if the trainer needs none of its own.

    It is the model of `model_path`, also after a resume, with the policy's attention and matrices in its compute dtype.
    With adapters it is the policy without them, unless biases are trained too. With a sharding backend each of several
    `ranks` gets a part; all compute the same number of micro-batches. `has_servers`: the world has reference servers.
    """
    if not config.uses_local_reference(has_servers):
        return None
    rl = config.finetune.rl
    if has_adapters(policy) and config.finetune.lora.bias == "none":
        logger.info("reference model: the policy with its adapters switched off")
        return ReferenceModel(policy, device)
    served_length = config.vllm_config.number("max-model-len")
    trust_remote_code = config.finetune.trust_remote_code
    ranks = ranks or Ranks(device=device)
    in_parts = ranks.world_size > 1 and shards_weights(config)
    with loaded_in_parts(ranks) if in_parts else nullcontext():
        language_model = load_language_model(config.model_path, policy.attention, trust_remote_code, served_length)
    language_model.requires_grad_(False)
    keep_products_exact(language_model, policy.compute_dtype)
    if config.backend.type != "deepspeed":
        # Like the initial policy: rounding changes a model that was saved in fp32.
        rounded = parameters_to_round(
            language_model, policy.compute_dtype, policy.served_dtype, is_merged=sends_merged(policy)
        )
        round_for_good(rounded, policy.served_dtype)
    model = PolicyModel(
        language_model.eval(),
        temperature=policy.temperature,
        chunk_tokens=policy.chunk_tokens,
        fp32_head=policy.fp32_head,
        compute_dtype=policy.compute_dtype,
        tf32=policy.tf32,
        shares_prefixes=policy.shares_prefixes,
    )
    model.has_linear_head = policy.has_linear_head
    if in_parts:
        shard_frozen(model.to(device), ranks, rl.reference_offload and device.type != "cpu")
    place = ", offloaded to the CPU" if rl.reference_offload else ""
    copy = "a part of a frozen copy" if in_parts else "a frozen copy"
    logger.info("reference model: %s of %s%s", copy, config.model_path, place)
    return ReferenceModel(model, device, rl.reference_offload and not in_parts)


@contextmanager
def _on_device(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Within it the tensors are copies on `device`. The originals are restored without copying back."""
    tensors = [*model.parameters(), *model.buffers()]
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, non_blocking=True)
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
