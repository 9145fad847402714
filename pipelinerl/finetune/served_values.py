"""The dtype of the servers' weights, and a trainer whose parameters have values that servers can have.

Servers hold weights in 16 bits. A trainer that computes with fp32 weights follows another policy than the one that
sampled: it sees the part of every update that rounding removes, and the difference grows from step to step. So the
forward and backward passes run on the rounded values, as in all mixed precision training (Micikevicius et al. 2018,
section 3.1), and the optimizer updates the sums, the fp32 master weights.

Products in bf16 round the matrices of linear layers by themselves. What else a model computes with is rounded here:
norms and other vectors, embeddings, experts that do not follow autocast. With products in fp32 or TF32 it is every
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from pipelinerl.config import RunConfig
from pipelinerl.finetune.experts import own_experts_parameters

_BY_NAME = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
#: vLLM refuses them in float16.
_NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
#: From this compute capability on GPUs have bf16 (Ampere).
_BF16_FROM = (8, 0)


def wire_dtype(config: RunConfig, computed: torch.dtype, device: torch.device, path: str | None = None) -> torch.dtype:
    """Dtype in which weights travel to servers, given that of the trainer's products. No server has to answer.

    It is the servers' own, so that a weight is rounded once; but a trainer with bf16 products sends what it multiplies.
    `vllm_config.vllm_kwargs.dtype` names the servers' dtype. Without the key, servers on a CPU are started in fp32;
    otherwise, and with `auto`, vLLM decides by the checkpoint (`vllm/config/model.py`, version 0.32), and serves no
    fp32 checkpoint in fp32.

    Args:
        device: of the trainer; servers are taken to have the same kind.
        path: the model; default: the configuration's.
    """
    if computed != torch.float32:
        return computed
    if named := named_dtype(config.vllm_config.vllm_kwargs, torch.float32 if device.type == "cpu" else None):
        return named
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _BF16_FROM
    model = path or config.model_path
    model_config = AutoConfig.from_pretrained(model, trust_remote_code=config.finetune.trust_remote_code)
    return automatic_dtype(checkpoint_dtype(model_config), model_config.model_type, has_bf16)


def named_dtype(vllm_kwargs: Mapping[str, Any], default: torch.dtype | None = None) -> torch.dtype | None:
    """What the option `dtype` of the servers names, `default` without it; None: vLLM decides."""
    options = {name.strip().lstrip("-"): value for name, value in vllm_kwargs.items()}
    return _BY_NAME.get(str(options["dtype"]).strip().lower()) if "dtype" in options else default


def automatic_dtype(checkpoint: torch.dtype, model_type: str, has_bf16: bool = True) -> torch.dtype:
    """What vLLM's `auto` is for a model whose configuration says `checkpoint`."""
    allowed = [torch.bfloat16] if has_bf16 else []
    if model_type not in _NOT_IN_FLOAT16:
        allowed.append(torch.float16)
    # fp32 is left only to models that can be in neither.
    return checkpoint if checkpoint in allowed else (*allowed, torch.float32)[0]


def checkpoint_dtype(model_config: Any) -> torch.dtype:
    """The dtype that the configuration of a model states, else fp32."""
    stated = getattr(model_config, "dtype", None) or getattr(model_config.get_text_config(), "dtype", None)
    return getattr(torch, str(stated).removeprefix("torch."), torch.float32)


class ServedValues:
    """Parameters at values of `dtype`, and what the fp32 master weights have beyond them.

    Args:
        parameters: fp32, sharded or not. The rest of a trained one is kept in another fp32 tensor of its kind; a frozen
            one is rounded for good.
        dtype: of the weights in the servers. What is beyond its range becomes its largest number, the rest is kept:
            it is refused by name when it is sent.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._rests: list[torch.Tensor] = [torch.empty_like(parameter) for parameter in self._trained]
        self._places = {id(parameter): place for place, parameter in enumerate(self._trained)}
        round_for_good([parameter for parameter in parameters if not parameter.requires_grad], dtype)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Take the parameters as master weights and round them. What is taken away is kept exactly."""
        for parameter, rest in zip(self._trained, self._rests, strict=True):
            rest.copy_(parameter)
            parameter.copy_(_narrowed(rest, self.dtype))
            # Exact: the difference of two floats so close has no more digits than the larger of them.
            rest.sub_(parameter.to(rest.device))

    @contextmanager
    def masters(self) -> Iterator[None]:
        """The parameters are the master weights inside, and whatever they are then is rounded at the end."""
        with torch.no_grad():
            for parameter, rest in zip(self._trained, self._rests, strict=True):
                parameter.add_(rest.to(parameter.device))
        try:
            yield
        finally:
            self.round()

    def move_rests(self, device: torch.device) -> None:
        """Keep what the rounded values lack on `device`."""
        self._rests = [rest.to(device) for rest in self._rests]

    def value_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The master weight of `parameter` as a tensor of its own; of a parameter that is not rounded it is itself."""
        place = self._places.get(id(parameter))
        return parameter if place is None else parameter.detach() + self._rests[place].to(parameter.device)

    def values_in(self, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """A function from a parameter to what is cast to `dtype`, so that each master weight is rounded once.

        In the servers' dtype the parameter itself is right, and rests that wait in host memory stay there. Not so in
        float16: it hides what is beyond the range.
        """
        if dtype == self.dtype != torch.float16:
            return lambda name, parameter: parameter
        return self.value_of


def round_for_good(parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Round frozen parameters to values of `dtype`; nothing is kept of what is taken away."""
    for parameter in parameters:
        parameter.data.copy_(_narrowed(parameter.data, dtype))


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:
        # An infinite weight would leave nothing to get the master back from.
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def parameters_to_round(
    language_model: torch.nn.Module, computed: torch.dtype, served: torch.dtype, *, is_merged: bool
) -> list[torch.nn.Parameter]:
    """The parameters that products in `computed` would use with more digits than `served` has.

    Only matrices of linear layers, and experts that follow autocast, are sure to be rounded by their products. Other
    products of experts may take weights as they are, biases may be added in fp32, and some vectors have two or three
    dimensions.
    Adapters whose servers get the merged matrix (`is_merged`), which nobody holds here, are left alone.
    """
    if torch.finfo(served).bits >= 32:
        return []
    linear = {id(m.weight) for m in language_model.modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    # A head that is tied to the embedding is a linear layer too, but the embedding is looked up in fp32.
    linear -= {id(m.weight) for m in language_model.modules() if isinstance(m, torch.nn.Embedding)}
    spared = linear if computed == served or is_merged else set()
    if computed == served:
        spared |= {id(parameter) for parameter in own_experts_parameters(language_model)}
    return [p for p in language_model.parameters() if p.dtype == torch.float32 and id(p) not in spared]
