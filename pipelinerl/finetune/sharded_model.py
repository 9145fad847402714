"""A model of which every rank has a part, from the files until a backend shards it in its own way.

While a model is loaded, each parameter is read, converted as its family needs it, cut along its first dimension, and
all but this rank's rows are dropped before the next one is read. Such a part is a `DTensor`. A model in parts cannot
compute: `whole_for_trial` gathers one layer after the other for `model_check.py`. Then the backends take over:
FSDP2 takes the rows as they are, ZeRO-3 gathers and cuts one parameter after the other. A frozen model beside the
policy, the reference of KL, is left to FSDP2 with both.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipelinerl.config import RunConfig
from pipelinerl.config.load import read_deepspeed_file
from pipelinerl.config.resources import DeepSpeedSettings, FSDPSettings
from pipelinerl.finetune.policy import PolicyModel, decoder_layers
from pipelinerl.finetune.ranks import RankFault, Ranks

#: Rows of the vocabulary that a trial computes with. A whole vocabulary may be larger than all else that is gathered.
_TRIAL_VOCABULARY = 1024
#: transformers reads ahead without a bound, unless told not to.
_READ_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
#: `mallopt(3)`: blocks from this size on are mapped, so that they are unmapped when they are freed.
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 2**20


def shards_weights(config: RunConfig) -> bool:
    """Whether the backend gives each of several ranks a part of the weights."""
    backend = config.backend
    if isinstance(backend, DeepSpeedSettings):
        return bool(read_deepspeed_file(backend.config)["zero_optimization"]["stage"] == 3)
    return isinstance(backend, FSDPSettings)


@contextmanager
def loaded_in_parts(ranks: Ranks) -> Iterator[None]:
    """Parameters that `from_pretrained` loads within it become parts on this rank's device. All ranks load the same."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    _return_freed_blocks()

    # torch's annotation says that such a hook returns nothing.
    def keep_part(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> Any:
        # Those that no file has are drawn later, in place, so every rank needs them whole.
        return part_of(parameter, mesh, ranks) if getattr(parameter, "_is_hf_initialized", False) else None

    hook = register_module_parameter_registration_hook(keep_part)
    before = os.environ.get(_READ_IN_ORDER)
    os.environ[_READ_IN_ORDER] = "1"
    try:
        yield
    finally:
        hook.remove()
        del os.environ[_READ_IN_ORDER]
        if before is not None:
            os.environ[_READ_IN_ORDER] = before


def _return_freed_blocks() -> None:
    """Let memory of large tensors on the host go back to the system when they are freed.

    glibc keeps it between smaller blocks, where the next tensor of this size does not fit, as torch aligns tensors: the
    whole model would stay in memory after all.
    """
    with suppress(OSError, AttributeError):
        # Another C library has no such option.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def part_of(parameter: torch.nn.Parameter, mesh: DeviceMesh, ranks: Ranks) -> torch.nn.Parameter | None:
    """This rank's rows of a whole parameter, on its device; None for what has no rows or values, or is in parts."""
    if parameter.ndim == 0 or parameter.is_meta or isinstance(parameter, DTensor):
        return None
    start, end = _rows_of(parameter, ranks.rank, ranks.world_size)
    # Copied: a slice would keep the whole alive.
    own = parameter.detach()[start:end].contiguous().to(ranks.device, copy=True)
    stride = torch.empty(parameter.shape, device="meta").stride()
    sharded = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=stride)
    part = torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    # Marks of transformers, such as the one above.
    part.__dict__.update(parameter.__dict__)
    return part


def has_parts(model: torch.nn.Module) -> bool:
    """Whether a parameter of `model` is a part."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def replace_parameters(
    model: torch.nn.Module, made: Callable[[str, torch.nn.Parameter], torch.nn.Parameter | None]
) -> None:
    """Put `made(name, parameter)`, unless it is None, in place of every parameter. Tied ones stay tied.

    What is replaced can be freed before the next one is made.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner, leaf, parameter in _places(model):
        places.setdefault(id(parameter), []).append((owner, leaf))
    del owner, leaf, parameter
    for name, at in [(name, places[id(parameter)]) for name, parameter in model.named_parameters()]:
        new = made(name, getattr(*at[0]))
        for owner, leaf in at if new is not None else ():
            setattr(owner, leaf, new)


def shard_parts(policy: PolicyModel, ranks: Ranks, shard: Callable[[], object]) -> None:
    """Have `shard` make an FSDP2 model of a policy in parts, without a whole parameter: it sees parameters without
    values, and the parts take their places afterwards."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    parts: dict[str, torch.Tensor] = {}

    def set_aside(name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        cut = part_of(parameter, mesh, ranks)
        part: Any = parameter if cut is None else cut
        parts[name] = part.detach().to_local()
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def put_back(name: str, parameter: Any) -> torch.nn.Parameter:
        own, shape, stride = parts.pop(name), parameter.shape, parameter.stride()
        placed = parameter.device_mesh, parameter.placements
        value = DTensor.from_local(own, *placed, run_check=False, shape=shape, stride=stride)
        return torch.nn.Parameter(value, requires_grad=parameter.requires_grad)

    replace_parameters(policy, set_aside)
    shard()
    replace_parameters(policy, put_back)


def shard_frozen(policy: PolicyModel, ranks: Ranks, offload: bool) -> None:
    """Make an FSDP2 model of a frozen policy in parts: a layer is whole while it runs, the rest in the forward pass.

    Args:
        offload: its parts stay in the memory of the CPU, and a layer's travel when it runs.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    kept = CPUOffloadPolicy() if offload else OffloadPolicy()

    def shard() -> None:
        for module in (*decoder_layers(policy), policy):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=kept)

    if offload:
        replace_parameters(policy, lambda _, part: torch.nn.Parameter(part.detach().cpu(), requires_grad=False))
    shard_parts(policy, ranks, shard)


@contextmanager
def whole_for_trial(policy: PolicyModel, ranks: Ranks) -> Iterator[None]:
    """Within it a policy in parts computes, without gradients, on a small vocabulary. Nothing changes for others.

    A layer is whole while it runs; what lies outside of the layers is whole all the time. All ranks compute the same,
    and before they gather anything they agree that each of them can: a rank that leaves the computation calls
    `ranks.first_fault`, and the others do not wait for it in a gather.

    Raises:
        RankFault: on every rank, when it begins or while a layer runs: a rank has no room for what is gathered next,
            or left the computation.
    """
    if not has_parts(policy):
        yield
        return
    layers = decoder_layers(policy)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [p for p in policy.parameters() if isinstance(p, DTensor) and id(p) not in inside]
    with ExitStack() as stack:
        cut = stack.enter_context(_small_vocabulary(policy))
        shapes = [(_TRIAL_VOCABULARY, *p.shape[1:]) if id(p) in cut else p.shape for p in outside]
        _agree_on_room(outside, shapes, ranks)
        values = {id(p): _first_rows(p) if id(p) in cut else p.full_tensor().detach() for p in outside}
        stack.callback(_exchange(policy, values))
        for layer in layers:
            stack.callback(_exchange_while_it_runs(layer, lambda layer: _gathered(layer, ranks)))
        yield


@contextmanager
def wide_for_trial(policy: PolicyModel) -> Iterator[None]:
    """Within it a policy with frozen weights in 16 bits computes as if they were in fp32: a layer is wide while it runs
    (and until its backward pass, unless activations are checkpointed), what lies outside of the layers all the time."""
    layers = decoder_layers(policy)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    if not any(map(_is_narrow, policy.parameters())):
        yield
        return
    with ExitStack() as stack:
        stack.callback(_exchange(policy, _widened(policy, inside)))
        for layer in layers:
            stack.callback(_exchange_while_it_runs(layer, _widened))
        yield


@contextmanager
def _small_vocabulary(policy: PolicyModel) -> Iterator[set[int]]:
    """Within it the model says that it has `_TRIAL_VOCABULARY` tokens. Yields the `id`s of what has a row for each."""
    model = policy.language_model
    config = model.config.get_text_config()
    before, embedding = config.vocab_size, cast(Any, model.get_input_embeddings())
    padding = getattr(embedding, "padding_idx", None)
    if before <= _TRIAL_VOCABULARY:
        yield set()
        return
    owners = [owner for owner in (embedding, model.get_output_embeddings()) if owner is not None]
    config.vocab_size = _TRIAL_VOCABULARY
    # Only gradients care for it, and it may be beyond the rows that are left.
    embedding.padding_idx = None
    try:
        yield {id(p) for owner in owners for p in owner.parameters(recurse=False) if p.shape[0] >= before}
    finally:
        config.vocab_size, embedding.padding_idx = before, padding


def _first_rows(part: DTensor) -> torch.Tensor:
    """The first rows of a parameter in parts, on every rank."""
    mesh, local = part.device_mesh, part.to_local().detach()
    start, _ = _rows_of(part, mesh.get_local_rank(), mesh.size())
    rows = local.new_zeros((_TRIAL_VOCABULARY, *part.shape[1:]))
    own = local[: max(_TRIAL_VOCABULARY - start, 0)]
    rows[start : start + len(own)] = own
    # Exact: all other summands are 0.
    dist.all_reduce(rows, group=mesh.get_group())
    return rows


def _agree_on_room(parts: Sequence[DTensor], shapes: Sequence[Sequence[int]], ranks: Ranks) -> None:
    """Raise RankFault on all ranks if one has no room for tensors of `shapes`, or none of them comes here."""
    if not shapes:
        return
    fault = None
    try:
        # Freed at once: the allocator keeps the room. Gathering takes that of the largest one again.
        room = [part.to_local().new_empty(shape) for part, shape in zip(parts, shapes, strict=True)]
        torch.empty_like(max(room, key=torch.numel))
    except RuntimeError as error:
        fault = f"{type(error).__name__}: {error}"
    if (told := ranks.first_fault(fault)) is not None:
        raise RankFault(told)


def _gathered(layer: torch.nn.Module, ranks: Ranks) -> dict[int, torch.Tensor]:
    """The whole parameters of a layer in parts, by the `id` of the part."""
    parts = [parameter for parameter in layer.parameters() if isinstance(parameter, DTensor)]
    _agree_on_room(parts, [part.shape for part in parts], ranks)
    return {id(part): part.full_tensor().detach() for part in parts}


def _widened(module: torch.nn.Module, but: Collection[int] = ()) -> dict[int, torch.Tensor]:
    """The parameters of `module` that are in 16 bits, in fp32, by their `id`; without those of the `id`s `but`."""
    return {id(p): p.detach().float() for p in module.parameters() if _is_narrow(p) and id(p) not in but}


def _is_narrow(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize == 2


def _exchange_while_it_runs(
    layer: torch.nn.Module, made: Callable[[torch.nn.Module], Mapping[int, torch.Tensor]]
) -> Callable[[], None]:
    """Put what `made` makes of `layer` in place of its parameters before its forward pass, and take it out after.
    Returns what ends this."""
    undo: list[Callable[[], None]] = []

    def put(*_: Any) -> None:
        undo.append(_exchange(layer, made(layer)))

    def release(*_: Any) -> None:
        # Also called where nothing was put.
        while undo:
            undo.pop()()

    handles = [layer.register_forward_pre_hook(put), layer.register_forward_hook(release, always_call=True)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _exchange(model: torch.nn.Module, values: Mapping[int, torch.Tensor]) -> Callable[[], None]:
    """Put `values`, by the `id` of a parameter, in place of parameters of `model`. Returns what undoes it."""
    places = [place for place in _places(model) if id(place[2]) in values]
    for owner, leaf, parameter in places:
        setattr(owner, leaf, torch.nn.Parameter(values[id(parameter)], requires_grad=False))

    def undo() -> None:
        for owner, leaf, parameter in places:
            setattr(owner, leaf, parameter)

    return undo


def _places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Every place of a parameter: module, name in it, parameter. A tied one has several."""
    return [
        (owner, leaf, parameter)
        for owner in model.modules()
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _rows_of(parameter: torch.Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """First row of a rank and the one after its last, as `torch.chunk` and FSDP2 cut."""
    size = math.ceil(parameter.shape[0] / world_size)
    return min(rank * size, parameter.shape[0]), min((rank + 1) * size, parameter.shape[0])
