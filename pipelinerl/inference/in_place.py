"""Whether new weights may be copied straight into a server's working tensors, and whether an update covers them all.

Called by `inference.reload` at every update. vLLM's layerwise reload prepares and rebuilds every layer, which costs
more time than the transfer itself; a model whose working tensors are those of its checkpoint (merged and sharded, but
not packed or quantized) needs none of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipelinerl.weights.base_print import base_print
from pipelinerl.weights.manifest import coverage_problems, local_folder, read_manifest

#: `0` in a server's environment: load layer by layer, whatever the model.
IN_PLACE_VARIABLE = "PIPELINERL_IN_PLACE_RELOAD"


def can_load_in_place(model: torch.nn.Module, environ: Mapping[str, str]) -> bool:
    """True if nobody turned it off and every layer computes with the tensors that its weight loaders fill.

    CPUs pack the matrices of linear layers; quantized and expert layers rearrange theirs; some attention layers keep
    products of theirs, or sinks in another dtype. Layers wrapped for adapters have other names than the checkpoint, and
    some models pass over names that they do not know.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if environ.get(IN_PLACE_VARIABLE) == "0" or not current_platform.is_cuda():
        return False
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in plain:
            return False
        if hasattr(module, "base_layer"):
            return False
        if hasattr(module, "process_weights_after_loading") and (
            type(module) is not Attention or _keeps_a_copy(module.impl)
        ):
            return False
    return True


def _keeps_a_copy(impl: Any) -> bool:
    """Whether an attention kernel may hold something made of weights (sinks in fp32) that only a reload renews."""
    from vllm.v1.attention.backend import AttentionImplBase

    for variant in impl.get_impl_variants():
        has_nothing = type(variant).process_weights_after_loading is AttentionImplBase.process_weights_after_loading
        # Without sinks those that are known have nothing to renew; of one without the attribute nothing is known.
        if not has_nothing and getattr(variant, "sinks", variant) is not None:
            return True
    return False


def checkpoint_tensors(model_config: Any) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes in the checkpoint that this server was started with; None if it is not in safetensors format."""
    folder = local_folder(model_config.model, model_config.revision)
    return None if folder is None else read_manifest(folder)


def print_of_checkpoint(model_config: Any) -> str | None:
    """What tells the weights that this server was started with from others; None if they are not in safetensors."""
    return base_print(local_folder(model_config.model, model_config.revision))


def is_tied(model_config: Any) -> bool:
    """Whether the output head is the embedding."""
    return bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))


def missing_from_update(
    expected: Mapping[str, tuple[int, ...]], tied: bool, names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[str]:
    """What is wrong with an update of these tensors; the layers cannot tell afterwards, when loading in place.

    Args:
        expected: the tensors of the server's checkpoint.
        tied: its output head is the embedding.
        names: of the tensors of the update.
        shapes: theirs.
    """
    sent = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
    return coverage_problems(expected, sent, tied)
