"""The layerwise reload of vLLM, made safe for repeated and failed updates. Used by every transfer engine of ours.

vLLM's own sequence accepts an incomplete set of tensors, keeps half-loaded layers of a failed update as if they were
part of the next one, and leaves a packed copy of tied embeddings behind on CPUs. `CheckedReload` mends the three.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from pipelinerl.inference.adapter_room import serves_adapter
from pipelinerl.inference.in_place import can_load_in_place, checkpoint_tensors, is_tied, missing_from_update
from pipelinerl.inference.planned_load import Mode, PlannedLoader
from pipelinerl.inference.transfer_info import PackedUpdateInfo
from pipelinerl.weights.layout import BufferLayout, LayoutCache, UpdateLayout

if TYPE_CHECKING:
    from pipelinerl.inference.adapter_update import AdapterUpdates

# Below the name of vLLM, whose configuration of logging is the one that the workers have.
logger = logging.getLogger(f"vllm.{__name__}")


class IncompleteUpdateError(RuntimeError):
    """The tensors of an update did not cover the server's model."""


class CheckedReload:
    """Mixin of a `WeightTransferEngine` (which provides `model` and `model_config`): its update life cycle.

    Loads layer by layer; a plain model on a GPU can be loaded in place (see `inference.in_place`). Where updates
    bring an adapter, the model is left alone (see `inference.adapter_update`).
    """

    #: The engine calls `expect` with all tensors of an update before it receives them, and `all_loaded` afterwards.
    may_load_in_place = False
    model: torch.nn.Module
    model_config: Any
    _in_place: bool = False
    _expected: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    _covered: bool = False
    # What is worked out once: it depends on the model alone, or on what an update looks like.
    _rule: tuple[torch.nn.Module, Mapping[str, tuple[int, ...]] | None] | None = None
    _layouts: LayoutCache | None = None
    _loader: PlannedLoader | None = None
    _checked: tuple[Mapping[str, tuple[int, ...]], UpdateLayout] | None = None
    _adapter: AdapterUpdates | None = None

    def start_weight_update(self) -> None:
        """Prepare for new weights, after forgetting what a failed update left."""
        if serves_adapter(os.environ):
            self._begin_adapter()
            return
        expected = self._tensors_in_place() if self.may_load_in_place else None
        self._in_place = expected is not None
        self._covered = False
        self._expected = expected or {}
        if not self._in_place:
            roll_back(self.model)
            layerwise.initialize_layerwise_reload(self.model)

    def _begin_adapter(self) -> None:
        if self._adapter is None or self._adapter.model is not self.model:
            from pipelinerl.inference.adapter_update import AdapterUpdates

            self._adapter = AdapterUpdates(self.model, checkpoint_tensors(self.model_config))
            self._checked = None
        self._covered = False
        self._adapter.begin()

    def _tensors_in_place(self) -> Mapping[str, tuple[int, ...]] | None:
        """Names and shapes that an update in place has to cover; None if the model is loaded layer by layer."""
        if self._rule is None or self._rule[0] is not self.model:
            in_place = can_load_in_place(self.model, os.environ)
            # Without a list of its tensors only the layers can tell whether an update is complete.
            self._rule = (self.model, checkpoint_tensors(self.model_config) if in_place else None)
        return self._rule[1]

    def layout_of(self, update_info: PackedUpdateInfo, chunk_bytes: int) -> UpdateLayout:
        """Where the tensors of the update lie in its buffers, after `expect` agreed to them."""
        self._layouts = self._layouts or LayoutCache()
        self._loader = self._loader or PlannedLoader(os.environ)
        layout = self._layouts.of(update_info.names, update_info.dtype_names, update_info.shapes, chunk_bytes)
        if self._checked is None or self._checked[0] is not self._expected or self._checked[1] is not layout:
            self.expect(update_info.names, update_info.shapes)
            self._checked = (self._expected, layout)
        if self._in_place:
            self._loader.begin(self.model, layout)
        return layout

    def load_buffer(self, part: BufferLayout, buffer: torch.Tensor) -> None:
        """Load a checked buffer of the update; it may be read until the current stream has come here."""
        if self._adapter is not None:
            self._adapter.load(part.unpack(buffer))
        elif self._in_place and self._loader is not None:
            self._loader.load(self.model, part, buffer)
        else:
            # vLLM types its models as plain modules.
            model: Any = self.model
            model.load_weights(part.unpack(buffer))

    @property
    def only_copies(self) -> bool:
        """Whether buffers are loaded by proven copies alone: they take no memory, and need no buffer afterwards."""
        return self._in_place and self._loader is not None and self._loader.mode is Mode.COPY

    def expect(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Check what is about to be received, where nothing else would notice that it is incomplete.

        Raises:
            IncompleteUpdateError: these tensors are not those of the model. Nothing was received.
        """
        if self._adapter is not None:
            if problems := self._adapter.problems(names, shapes):
                raise IncompleteUpdateError("; ".join(problems))
            return
        if not self._in_place:
            return
        if problems := missing_from_update(self._expected, is_tied(self.model_config), names, shapes):
            raise IncompleteUpdateError("; ".join(problems))

    def all_loaded(self) -> None:
        """Every tensor that `expect` was told of has been loaded."""
        self._covered = True
        if self._in_place and self._loader is not None:
            self._loader.finish()

    def finish_weight_update(self) -> None:
        """Put the loaded weights in place.

        Raises:
            IncompleteUpdateError: a layer did not receive all of its weights. The server must stay paused.
        """
        if self._in_place or self._adapter is not None:
            if not self._covered:
                raise IncompleteUpdateError("not all tensors were received")
            if self._adapter is not None:
                self._adapter.finish()
            return
        if missing := incomplete_layers(self.model):
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise IncompleteUpdateError(f"the update left {len(missing)} layers without all of their weights: {shown}")
        layerwise.finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        repack_output_heads(self.model)


def roll_back(model: torch.nn.Module) -> None:
    """Drop the buffered tensors of an update that was never finished and put the working tensors back.

    Layers that had been completed keep their new weights: the model is whole again only after a complete update.
    """
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()  # type: ignore[no-untyped-call]
    layerwise.LOADING_LAYERS.clear()


def incomplete_layers(model: torch.nn.Module) -> list[str]:
    """Names of the layers that are still waiting for weights in the update that is open.

    A complete layer is processed as soon as its last element arrived, so what still waits is incomplete. Exceptions:
    layers without parameters; attention layers (their scales are optional); vocabulary layers, whose padding rows never
    arrive; a head that is tied to the embedding, which receives nothing of its own.
    """
    waiting: list[str] = []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or not any(True for _ in layer.parameters(False)):
            continue
        if isinstance(layer, VocabParallelEmbedding):
            tied = isinstance(layer, ParallelLMHead) and _is_tied(model)
            if tied or info.load_numel >= _rows_of_checkpoint(layer):
                continue
        waiting.append(f"{name or type(layer).__name__} ({info.load_numel} of {info.load_numel_total} elements)")
    return waiting


def _is_tied(model: torch.nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text_config, "tie_word_embeddings", False))


def _rows_of_checkpoint(layer: VocabParallelEmbedding) -> int:
    """Elements that this shard of a vocabulary layer receives: its rows without padding, times their width."""
    shard = layer.shard_indices
    rows = (shard.org_vocab_end_index - shard.org_vocab_start_index) + (
        shard.added_vocab_end_index - shard.added_vocab_start_index
    )
    return rows * layer.embedding_dim


def repack_output_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed matrix that vocabulary layers multiply with on CPUs.

    It is built once from the weights and is not a view of them; when the head is tied to the embedding, the reload
    copies new values into the embedding and nobody tells the packed copy.
    """
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
