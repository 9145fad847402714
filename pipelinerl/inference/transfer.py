"""Weight updates inside a worker of a server: receives packed buffers and loads them into the model.

`PackedTransferEngine` is what vLLM calls; a transport (`weights.transport`) brings the buffers. There are three ways to
load them:

| way | for | what it does |
|---|---|---|
| in place | plain models on GPUs | vLLM's loaders write into the tensors that the model computes with |
| layer by layer | all others | vLLM's layerwise reload, made safe for repeated and failed updates |
| adapter | `finetune.lora.sync=adapter` | the model stays, its adapter is replaced (`inference.adapter`) |

In place saves two thirds of the time of an update (62 ms against 188 ms at 1.5 B on an H200).
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from pipelinerl.inference.adapter import AdapterLoading
from pipelinerl.inference.arguments import serves_adapter
from pipelinerl.weights.buffers import NamedTensors, coverage_problems, metas_of, receive_buffers, some
from pipelinerl.weights.manifest import Shape, local_folder, read_manifest
from pipelinerl.weights.transport import Receiver, open_receiver

logger = logging.getLogger(__name__)

#: `0` in a server's environment: load layer by layer, whatever the model.
IN_PLACE_VARIABLE = "PIPELINERL_IN_PLACE_RELOAD"
#: One update in so many records which tensors the loaders read, the first and one after a failure included: it costs
#: about 0.1 ms for each tensor.
NOTED_EVERY = 10


class IncompleteUpdateError(RuntimeError):
    """The tensors of an update did not cover the server's model."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`: what the trainer's sender prepared."""

    details: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What is about to be sent, in order (`weights.buffers.update_info_of`)."""

    tensors: list[tuple[str, str, list[int]]]
    chunk_bytes: int
    pass_id: int


class Loading(Protocol):
    """One way to load the tensors of an update."""

    def begin(self, is_noted: bool) -> None:
        """An update starts; forget what one that failed has left. `is_noted`: `load` says what was ignored."""
        ...

    def problems(self, sent: Mapping[str, Shape]) -> list[str]:
        """What is wrong with an update of these tensors, before they are received."""
        ...

    def load(self, tensors: NamedTensors) -> list[str]:
        """Load the tensors of one checked buffer, or keep them. Returns the names of those that the model ignored."""
        ...

    def finish(self) -> None:
        """All tensors were loaded: make the model use them. IncompleteUpdateError: it has not got all of them."""
        ...


class PackedTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Refuses incomplete and damaged updates and survives failed ones."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _receiver: Receiver | None = None
    _loading: Loading | None = None
    _is_received = False
    _ignored: Sequence[str] = ()
    _num_updates = 0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, after leaving an earlier one (of a trainer that is gone)."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = open_receiver(init_info.details, worker, self.device)

    def start_weight_update(self) -> None:
        self._is_received, self._ignored = False, ()
        self._loading = self._loading or _loading_of(self.model, self.model_config)
        self._loading.begin(self._num_updates % NOTED_EVERY == 0)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As the base class, which waits for an accelerator even if there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive every buffer and load it.

        Raises:
            IncompleteUpdateError: these are not the tensors of the model; nothing was received.
            RuntimeError: the trainer went away or is too slow, or a buffer is damaged.
        """
        if self._receiver is None or self._loading is None:
            raise RuntimeError("weight transfer is not initialized: call /init_weight_transfer_engine first")
        metas = metas_of(update_info.tensors)
        if problems := self._loading.problems({meta.name: meta.shape for meta in metas}):
            raise IncompleteUpdateError("; ".join(problems))
        receive, load, ignored = self._receiver.receive, self._loading.load, list[str]()
        chunk_bytes, pass_id = update_info.chunk_bytes, update_info.pass_id
        receive_buffers(metas, chunk_bytes, pass_id, receive, lambda tensors: ignored.extend(load(tensors)))
        parallel = self.parallel_config
        has_all_layers = parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel
        self._ignored = ignored if has_all_layers else ()
        self._is_received = True

    def finish_weight_update(self) -> None:
        """Put the loaded weights in place.

        Raises:
            IncompleteUpdateError: not all of them were received, or not all of those were loaded. The server must stay
                paused.
        """
        if self._loading is None or not self._is_received:
            raise IncompleteUpdateError("the update is not complete: not all tensors were received")
        if ignored := self._ignored:
            raise IncompleteUpdateError(f"the server's model ignored {len(ignored)} of the tensors: {some(ignored)}")
        self._loading.finish()
        self._num_updates += 1

    def abort(self) -> None:
        """Forget an update that failed or was cut short, and leave the trainer's group."""
        self._num_updates = 0
        self.reset_weight_update_target()
        roll_back(self.model)
        self.shutdown()

    def shutdown(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


def _loading_of(model: torch.nn.Module, model_config: Any) -> Loading:
    checkpoint = checkpoint_tensors(model_config)
    if serves_adapter(os.environ):
        return AdapterLoading(model, checkpoint)
    # Without a list of its tensors only the layers can tell whether an update is complete.
    if checkpoint is not None and os.environ.get(IN_PLACE_VARIABLE) != "0" and can_load_in_place(model):
        return InPlaceLoading(model, checkpoint, is_tied(model_config))
    return LayerwiseLoading(model, model_config)


def checkpoint_tensors(model_config: Any) -> dict[str, Shape] | None:
    """Names and shapes in the checkpoint that this server was started with; None if it is not in safetensors format."""
    folder = local_folder(model_config.model, model_config.revision)
    return None if folder is None else read_manifest(folder)


def is_tied(model_config: Any) -> bool:
    """Whether the output head is the embedding."""
    return bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))


class InPlaceLoading:
    """vLLM's loaders write into the tensors that the model computes with.

    The loaders need about 30 ms of Python per update, even for a small model, but make the same copies every time. So
    from the second update on they are replayed as one CUDA graph per buffer. Like vLLM's graphs of the forward pass,
    it relies on weights that stay at their addresses.
    """

    def __init__(self, model: Any, checkpoint: Mapping[str, Shape], tied: bool) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._tied = tied
        self._is_noted = True
        # By the tensors of a buffer; None: they were loaded once, or their copies cannot be captured.
        self._replays: dict[tuple[Any, ...], CapturedCopies | None] = {}
        self._can_capture = torch.cuda.is_available()
        self._staging_bytes = 0
        self._staging: torch.Tensor | None = None

    def begin(self, is_noted: bool) -> None:
        """Whatever an earlier update has left is overwritten."""
        self._is_noted = is_noted

    def problems(self, sent: Mapping[str, Shape]) -> list[str]:
        return coverage_problems(self._checkpoint, sent, self._tied)

    def load(self, tensors: NamedTensors) -> list[str]:
        key = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
        if key not in self._replays or not self._can_capture:
            self._replays[key] = None
            self._staging_bytes = max(self._staging_bytes, staging_bytes(tensors))
            return load_weights(self._model, tensors, is_noted=True)
        replay = self._replays[key] or self._capture(tensors)
        if replay is None:
            return load_weights(self._model, tensors, self._is_noted)
        self._replays[key] = replay
        replay.run(tensors)
        return []  # these copies were made before

    def _capture(self, tensors: NamedTensors) -> CapturedCopies | None:
        """The copies that the loaders make of these tensors; None if they do something that a graph cannot hold."""
        try:
            if self._staging is None or self._staging.numel() < self._staging_bytes:
                self._replays = dict.fromkeys(self._replays)
                self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=tensors[0][1].device)
            return CapturedCopies(self._model, tensors, self._staging)
        except (RuntimeError, ValueError) as error:  # out of memory is one of them
            logger.warning("updates are loaded without a CUDA graph: %s", str(error).splitlines()[0])
            self._can_capture = False
            # A capture that failed leaves the random generator in capture mode, and sampling would fail.
            if self._staging is not None:
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                    self._staging.zero_()
                self._staging = None
            return None

    def finish(self) -> None:
        """Everything is where it belongs."""


#: Starts of staged tensors: what vectorized copies need.
_ALIGNMENT_BYTES = 256


def staging_bytes(tensors: NamedTensors) -> int:
    """Size of the memory that `CapturedCopies` needs for these tensors."""
    return sum(-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for _, tensor in tensors)


class CapturedCopies:
    """What `model.load_weights` does on the device with tensors of these names, dtypes and shapes, as a CUDA graph.

    Args:
        tensors: of one buffer; nothing is loaded yet.
        staging: uint8; where the graph reads from. Buffers that are loaded one after the other may share it.

    Raises:
        RuntimeError: the loaders wait for the device, or do something else that cannot be captured.
    """

    def __init__(self, model: Any, tensors: NamedTensors, staging: torch.Tensor) -> None:
        self._staged: list[torch.Tensor] = []
        offset = 0
        for _, tensor in tensors:
            self._staged.append(staging[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            offset += staging_bytes([("", tensor)])
        self._graph = torch.cuda.CUDAGraph()
        names = [name for name, _ in tensors]
        # Other threads of the server may use the GPU meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            model.load_weights(list(zip(names, self._staged, strict=True)))

    def run(self, tensors: NamedTensors) -> None:
        """Load the tensors: the same names, dtypes and shapes in the same order."""
        torch._foreach_copy_(self._staged, [tensor for _, tensor in tensors])
        self._graph.replay()


def can_load_in_place(model: torch.nn.Module) -> bool:
    """Whether every layer computes with the tensors that its weight loaders fill.

    CPUs pack the matrices of linear layers; quantized and expert layers rearrange theirs; some attention layers keep
    products of theirs, or sinks in another dtype; layers wrapped for adapters have other names than the checkpoint.
    """
    if not current_platform.is_cuda():
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
    for variant in impl.get_impl_variants():
        has_nothing = type(variant).process_weights_after_loading is AttentionImplBase.process_weights_after_loading
        # The known kernels have nothing to renew without sinks; of one without the attribute nothing is known.
        if not has_nothing and getattr(variant, "sinks", variant) is not None:
            return True
    return False


class LayerwiseLoading:
    """vLLM's layerwise reload.

    By itself it accepts an incomplete set of tensors, takes half-loaded layers of a failed update for part of the next
    one, and on CPUs leaves experts unpacked and a packed copy of the old embedding in a tied head.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._is_noted = True

    def begin(self, is_noted: bool) -> None:
        self._is_noted = is_noted
        roll_back(self._model)
        forget_expert_kernels(self._model)
        layerwise.initialize_layerwise_reload(self._model)

    def problems(self, sent: Mapping[str, Shape]) -> list[str]:
        """None yet: the layers tell at the end what they have not got."""
        return []

    def load(self, tensors: NamedTensors) -> list[str]:
        return load_weights(self._model, tensors, self._is_noted)

    def finish(self) -> None:
        if missing := incomplete_layers(self._model):
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise IncompleteUpdateError(f"the update left {len(missing)} layers without all of their weights: {shown}")
        layerwise.finalize_layerwise_reload(self._model, self._model_config)  # type: ignore[no-untyped-call]
        repack_output_heads(self._model)


class ReadRecord(TorchDispatchMode):
    """Notes which of `tensors` are read while this is open: copied, or part of a computation. A view reads nothing."""

    def __init__(self, tensors: NamedTensors) -> None:
        super().__init__()
        places = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in places]
        self._ends_and_names = [(start + size, name) for start, size, name in places]
        self.unread = {name for _, _, name in places}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and self.unread:
            for value in args:
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                        self._note(tensor.data_ptr())
        return func(*args, **(kwargs or {}))

    def _note(self, address: int) -> None:
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            end, name = self._ends_and_names[place]
            if address < end:
                self.unread.discard(name)


def load_weights(model: Any, tensors: NamedTensors, is_noted: bool) -> list[str]:
    """Load `tensors` with the model's own loaders, which skip what they do not know without a word.

    Returns the names of those that were not read, if `is_noted`.
    """
    with ReadRecord(tensors) if is_noted else nullcontext() as record:
        if type(model).__name__ == "GptOssForCausalLM":
            tensors = list(_through_weight_loaders(model, tensors))
        model.load_weights(tensors)
    return sorted(record.unread) if record is not None else []


_STACKED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")


def _through_weight_loaders(model: torch.nn.Module, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as vLLM's GPT-OSS passes them to its weight loaders, which is all that a reload sees.

    It copies stacked experts and attention sinks into its parameters directly (seen with 0.32), but takes experts one
    by one. Sinks are loaded here.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        if found := _STACKED_EXPERTS.fullmatch(name):
            yield from ((f"{found[1]}.{expert}.{found[2]}", one) for expert, one in enumerate(tensor))
        elif name.endswith(".self_attn.sinks"):
            sinks: Any = parameters[name.replace(".self_attn.", ".attn.")]
            heads = sinks.shape[0]
            sinks.weight_loader(sinks, tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads))
        else:
            yield name, tensor


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
    layers without parameters, or with none whose elements vLLM counts; attention layers (their scales are optional);
    vocabulary layers, whose padding rows never arrive; a head that is tied to the embedding, which receives nothing of
    its own.
    """
    waiting: list[str] = []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        has_parameters = any(True for _ in layer.parameters(False)) and info.load_numel_total != 0
        if not info.can_load() or is_deferred_attention_layer(layer) or not has_parameters:
            continue
        if isinstance(layer, VocabParallelEmbedding):
            tied = isinstance(layer, ParallelLMHead) and _has_tied_head(model)
            if tied or info.load_numel >= _rows_of_checkpoint(layer):
                continue
        waiting.append(f"{name or type(layer).__name__} ({info.load_numel} of {info.load_numel_total} elements)")
    return waiting


def _has_tied_head(model: torch.nn.Module) -> bool:
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


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let layers of experts be prepared for their kernel again when their weights are there.

    On CPUs kernels read packed weights, and vLLM packs them only for a kernel that it makes (seen with 0.32): those of
    an update would be read as if they were packed.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_output_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed matrix that vocabulary layers multiply with on CPUs.

    It is built once from the weights and is not a view of them; when the head is tied to the embedding, the reload
    copies new values into the embedding and nothing renews the packed copy.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
