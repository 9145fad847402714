"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model.

The only file that knows peft, which is optional. Sharded weights are merged tensor by tensor, which peft cannot do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipelinerl.config.finetune import LoraConfig
from pipelinerl.config.load import ADAPTER_START, ADAPTER_WEIGHTS
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.served_weights import LANGUAGE_PREFIX, export_name, is_adapter_part
from pipelinerl.finetune.sharded_model import replace_parameters
from pipelinerl.finetune.tensor_files import read_tensors, write_tensors

ADAPTER = "adapter"
_NAME = "default"
#: What a layer that multiplies with its matrix does, and nothing else: some routers are linear layers by their class.
_PRODUCTS = (torch.nn.Linear.forward, Conv1D.forward)


ValueOf = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Update:
    """What an adapter adds to the matrix of its layer, alpha / r * B @ A."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scale: float
    is_transposed: bool

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """The product in fp32."""
        product = self.b.detach().float() @ self.a.detach().float()
        return self.scale * (product.T if self.is_transposed else product)


def _peft(module: str = "peft") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            "finetune.lora.enabled", True, "the package peft", "Install it: pip install pipelinerl[lora]."
        ) from error


def add_adapters(policy: PolicyModel, settings: LoraConfig, base_model: str, one_dtype: bool = False) -> None:
    """Freeze the language model of `policy` and put trainable adapters on its linear layers, in place.

    They are those of `settings.adapter_path`; without it the update starts at zero, and the policy computes what it
    computed before. A value head stays trainable. Weights of the frozen layers are kept in the policy's compute dtype,
    unless all parameters must have `one_dtype`.

    Raises:
        ConfigError: peft is not installed, the named layers are not linear layers inside the decoder, or the adapter to
            start from is not one of this model.
    """
    peft = _peft()
    model = policy.language_model
    if settings.adapter_path is None:
        config = peft.LoraConfig(
            r=settings.r, lora_alpha=settings.alpha, bias=settings.bias, target_modules=settings.target_modules
        )
        if not settings.target_modules:
            _choose_all(config, model)
    else:
        config = peft.LoraConfig.from_pretrained(settings.adapter_path)
        config.inference_mode, config.init_lora_weights = False, True
    config.lora_dropout, config.task_type, config.base_model_name_or_path = 0.0, "CAUSAL_LM", base_model
    try:
        peft.inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise _wrong_targets(settings, str(error)) from error
    for parameter in model.parameters():
        # peft gives them the dtype of the matrix beside them.
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    layers = list(_adapted_layers(model))
    if any(isinstance(layer, peft.tuners.lora.ParamWrapper) for _, layer in layers):
        raise _wrong_targets(settings, "the experts of a layer are one tensor, which gets no adapter")
    strange = sorted({type(layer.base_layer).__name__ for _, layer in layers if not _is_product(layer.base_layer)})
    head = model.get_output_embeddings()
    if strange or any(layer is head for _, layer in layers):
        raise _wrong_targets(settings, f"found {', '.join(strange) or 'the output head'}")
    if settings.adapter_path is not None:
        _load_adapter(model, settings.adapter_path, base_model)
    policy.adapter_config = config
    policy.sends_adapter = settings.sync == "adapter"
    if policy.sends_adapter:
        _refuse_what_is_no_adapter(model, settings)
    if not one_dtype:
        keep_products_exact(model, policy.compute_dtype)


def has_adapters(policy: PolicyModel) -> bool:
    return policy.adapter_config is not None


def sends_merged(policy: PolicyModel) -> bool:
    """Whether servers get matrices that no parameter of the trainer holds."""
    return has_adapters(policy) and not policy.sends_adapter


@contextmanager
def adapters_off(policy: PolicyModel) -> Iterator[None]:
    """Within it the policy is the frozen model that training started from (exact while biases are not trained)."""
    layers = [layer for _, layer in _adapted_layers(policy.language_model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_name(name: str, renamed: Callable[[str], str]) -> str | None:
    """Name of a policy parameter in an update that sends the adapter alone; None for all others.

    Args:
        renamed: gives what the checkpoint calls a matrix of the model.
    """
    if not is_adapter_part(name):
        return None
    layer, _, part = name.removeprefix(LANGUAGE_PREFIX).replace(f".{_NAME}.", ".").partition(".lora_")
    return f"{renamed(f'{layer}.weight').removesuffix('.weight')}.lora_{part}"


def updates(policy: PolicyModel) -> dict[int, Update]:
    """What is added to a frozen matrix, by the `id` of its parameter. Empty without adapters."""
    if not has_adapters(policy):
        return {}
    return {id(layer.base_layer.weight): _update_of(layer) for _, layer in _adapted_layers(policy)}


def _update_of(layer: Any) -> Update:
    a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    return Update(a, b, layer.scaling[_NAME], layer.fan_in_fan_out)


def sent_scales(policy: PolicyModel) -> dict[int, float]:
    """What a part of an adapter is multiplied with on its way, by the `id` of its parameter: alpha / r for B.

    A and B alone then say what is added, and servers need no alpha.
    """
    return {id(update.b): update.scale for update in updates(policy).values()}


@torch.no_grad()
def scaled(tensor: torch.Tensor, scale: float | None) -> torch.Tensor:
    """`tensor` times `scale` in fp32, or itself."""
    return tensor.detach() if scale in (None, 1.0) else tensor.detach().float() * scale


def merged_value(policy: PolicyModel, value_of: ValueOf) -> ValueOf:
    """A function from a parameter of `policy` to its merged value, W + alpha / r * B @ A in fp32.

    Merging happens when it is called, for that one tensor, so no second copy of the model ever exists. `value_of` gives
    what a parameter that is not merged is sent as.
    """
    table = updates(policy)

    def merged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = value_of(name, tensor)
        update = table.get(id(value))
        return value if update is None else value.detach().float() + update.value()

    return merged


def _peft_name(name: str) -> str:
    """What peft calls a parameter of the language model in the file of an adapter."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


@torch.no_grad()
def _load_adapter(model: PreTrainedModel, folder: str, base_model: str) -> None:
    """Give what is trained the values of the adapter in `folder`. Every rank reads all of it."""
    trained = {_peft_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    try:
        tensors = read_tensors(Path(folder) / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _no_adapter_of(folder, f"a readable {ADAPTER_WEIGHTS} ({error})") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(parameter.shape) for name, parameter in trained.items()}
    if others := sorted(set(shapes.items()) ^ set(expected.items())):
        name = others[0][0]
        found = f"{name} has shape {shapes.get(name)} there and {expected.get(name)} in the model"
        raise _no_adapter_of(folder, f"an adapter of {base_model} ({len(others)} differences: {found})")
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(tensors[name], parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(tensors[name])


def _no_adapter_of(folder: str, expected: str) -> ConfigError:
    return ConfigError(ADAPTER_START, folder, expected, "Name the model that the adapter was trained on in model_path.")


def save_adapter(folder: Path, policy: PolicyModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the adapter as peft reads it: `PeftModel.from_pretrained(base_model, folder)`. OSError if it fails.

    Args:
        tensors: the trained ones of an export, in its names.
    """
    trained = {}
    for name, parameter in policy.language_model.named_parameters():
        if parameter.requires_grad:
            trained[_peft_name(name)] = tensors[export_name(LANGUAGE_PREFIX + name)]
    folder.mkdir()
    assert policy.adapter_config is not None
    policy.adapter_config.save_pretrained(str(folder))
    write_tensors(folder / ADAPTER_WEIGHTS, trained)


def keep_products_exact(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep frozen weights that are only multiplied in `dtype`: under autocast their products come out the same.

    Embeddings (and a head that is tied to them) and vectors outside of linear layers stay in fp32, because they set the
    dtype of the hidden states.
    """
    wide = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)}
    biases = {id(m.bias) for m in model.modules() if isinstance(m, torch.nn.Linear) and m.bias is not None}

    def narrowed(_: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        is_multiplied = (parameter.ndim > 1 or id(parameter) in biases) and id(parameter) not in wide
        if not is_multiplied or parameter.requires_grad or parameter.dtype == dtype:
            return None
        return torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)

    replace_parameters(model, narrowed)


def _adapted_layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    kind = _peft().tuners.lora.LoraLayer
    yield from ((name, layer) for name, layer in module.named_modules() if isinstance(layer, kind))


def _refuse_what_is_no_adapter(model: torch.nn.Module, settings: LoraConfig) -> None:
    """An adapter in a server is A and B of a layer's matrix as a linear layer has it, and nothing else."""
    if others := [name for name, p in model.named_parameters() if p.requires_grad and not is_adapter_part(name)]:
        raise ConfigError(
            "finetune.lora.bias",
            settings.bias,
            f"none with finetune.lora.sync=adapter: servers take A and B only, and {others[0]} is trained too",
            "Set finetune.lora.bias=none, or finetune.lora.sync=merged.",
        )
    if turned := [name for name, layer in _adapted_layers(model) if _update_of(layer).is_transposed]:
        raise ConfigError(
            "finetune.lora.sync",
            settings.sync,
            f"merged for this model: the matrix of {turned[0]} lies transposed in its checkpoint",
            "Set finetune.lora.sync=merged.",
        )


def _choose_all(config: Any, model: PreTrainedModel) -> None:
    """Name all linear layers in peft's `config`, except for the output head and those named like experts, for which
    peft puts the experts' tensors."""
    head = model.get_output_embeddings()
    config.target_modules = {
        name for name, module in model.named_modules() if _is_product(module) and module is not head
    }
    _peft("peft.utils.transformers_weight_conversion").convert_peft_config_for_transformers(config, model, None)
    config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}


def _is_product(layer: torch.nn.Module) -> bool:
    return type(layer).forward in _PRODUCTS


def _wrong_targets(settings: LoraConfig, found: str) -> ConfigError:
    return ConfigError(
        "finetune.lora.target_modules",
        settings.target_modules,
        f"names of linear layers inside the decoder ({found})",
        "Name others, such as [q_proj, v_proj]"
        + (", or leave it empty for all of them." if settings.target_modules else "."),
    )
