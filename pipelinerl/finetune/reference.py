"""The frozen reference model beside the trainer: log-probs of the same targets for the KL term.

Made once by the assembly if `finetune.rl.reference` comes to `local`; asked by `StepRunner` once for each step. It
uses the policy's own path (packing, attention, chunked head, sampling temperature), so at the start the two agree
exactly in fp32. Waits for nothing but the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipelinerl.config import RunConfig
from pipelinerl.finetune.lora import adapters_off, has_adapters, keep_products_exact, sends_merged
from pipelinerl.finetune.model import load_language_model
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.served_values import parameters_to_round, round_for_good
from pipelinerl.rl.microbatch import MicroBatch

logger = logging.getLogger(__name__)


class ReferenceModel:
    """Log-probs under the frozen model.

    Args:
        model: a frozen copy, or the policy itself if it has adapters (they are switched off meanwhile).
        device: where micro-batches are computed.
        offload: keep the copy in the memory of the CPU between steps.
    """

    def __init__(self, model: PolicyModel, device: torch.device, offload: bool = False) -> None:
        self._model = model
        self._device = device
        self._offload = offload and device.type != "cpu"
        if not has_adapters(model):
            model.requires_grad_(False)
            model.to("cpu" if self._offload else device)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of every micro-batch's targets at the sampling temperature: fp32, shape of the targets, on the CPU.

        All micro-batches of a step in one go, so that an offloaded model travels once.
        """
        with self._frozen():
            return [self._score(batch) for batch in micro_batches]

    def _score(self, batch: MicroBatch) -> torch.Tensor:
        layout = self._model.layout_of(batch)
        layout = layout.to(self._device) if layout is not None else None
        logprobs: torch.Tensor = self._model(batch.to(self._device), layout).logprobs
        return logprobs.cpu()

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        if has_adapters(self._model):
            with adapters_off(self._model):
                yield
        elif self._offload:
            with _on_device(self._model, self._device):
                yield
        else:
            yield


def load_reference(
    config: RunConfig, policy: PolicyModel, device: torch.device, has_servers: bool
) -> ReferenceModel | None:
    """The reference model that the configuration asks for; None if the trainer needs none of its own.

    It is the model of `model_path`, also after a resume, with the policy's attention; matrices are kept in the policy's
    compute dtype. With adapters it is the policy without them, unless biases are trained too. `has_servers`: the world
    has servers of the reference model.
    """
    if not config.uses_local_reference(has_servers):
        return None
    rl = config.finetune.rl
    if has_adapters(policy) and config.finetune.lora.bias == "none":
        logger.info("reference model: the policy with its adapters switched off")
        return ReferenceModel(policy, device)
    language_model = load_language_model(config.model_path, policy.attention, config.finetune.trust_remote_code)
    language_model.requires_grad_(False)
    keep_products_exact(language_model, policy.compute_dtype)
    if config.backend.type != "deepspeed":
        # As the policy at the start: on a model that was saved in fp32 rounding changes something.
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
    )
    place = ", offloaded to the CPU" if rl.reference_offload else ""
    logger.info("reference model: a frozen copy of %s%s", config.model_path, place)
    return ReferenceModel(model, device, rl.reference_offload)


@contextmanager
def _on_device(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Copies of the tensors on `device` within, the originals behind it: nothing changed, so nothing is copied back."""
    tensors = [*model.parameters(), *model.buffers()]
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, non_blocking=True)
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
