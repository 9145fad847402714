"""Weights and AdamW state as named tensors in safetensors files, bit by bit. Called by the backends' save and load.

No pickle: a checkpoint is data. Sharded tensors are handled as the shard of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
_SEPARATOR = "/"


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to `file`. Raises OSError if the disk does not take them."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, str(file), metadata)
    except Exception as error:
        # safetensors reports a full disk with an error class of its own.
        raise OSError(f"{file}: {error}") from error


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of `file`, on the CPU."""
    return load_file(str(file))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_tensors(named: NamedParameters) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter, by name."""
    return {name: local(parameter.detach()) for name, parameter in named}


@torch.no_grad()
def load_parameters(named: NamedParameters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the parameters. ValueError if names or shapes differ."""
    parameters = dict(named)
    if parameters.keys() != tensors.keys():
        different = sorted(parameters.keys() ^ tensors.keys())
        raise ValueError(f"checkpoint: names differ from the model's: {different[:5]}")
    for name, parameter in parameters.items():
        target = local(parameter)
        if target.shape != tensors[name].shape:
            raise ValueError(
                f"checkpoint: {name}: got shape {list(tensors[name].shape)}, this rank needs {list(target.shape)}"
            )
        target.copy_(tensors[name])


def optimizer_tensors(named: NamedParameters, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State of every parameter (`step`, `exp_avg`, `exp_avg_sq`) under `<parameter>/<key>`."""
    return {
        f"{name}{_SEPARATOR}{key}": local(value)
        for name, parameter in named
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    named: NamedParameters, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """The inverse of `optimizer_tensors`. ValueError if a tensor belongs to no parameter."""
    parameters = dict(named)
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(_SEPARATOR)
        if name not in parameters:
            raise ValueError(f"checkpoint: optimizer state of unknown parameter {name}")
        optimizer.state[parameters[name]][key] = _like(parameters[name], key, value)


def _like(parameter: torch.nn.Parameter, key: str, value: torch.Tensor) -> torch.Tensor:
    if key == "step":
        return value
    value = value.to(local(parameter).device)
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    return value
