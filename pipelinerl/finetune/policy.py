"""The policy as one module: token ids in, log-probs of the targets out. Called by `step.py` through the backend.

The output head runs inside this module's `forward`, because sharded backends gather parameters in the hooks of the
module that they wrapped. Full logits never exist; only trained positions reach the head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from pipelinerl.finetune.attention import OWN_ATTENTIONS, VARLEN_ATTENTION, Layout, segment_layout, varlen_layout
from pipelinerl.rl.logprobs import logprobs_from_logits, token_logprobs
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.rl.precision import fp32_products, keep_exact

LANGUAGE_MODEL = "language_model"
VALUE_HEAD = "value_head"


class PolicyOutputs(NamedTuple):
    """Tensors of one micro-batch, shape of its `targets`, fp32; 0 where nothing is trained."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    values: torch.Tensor | None


class PolicyModel(torch.nn.Module):
    """A causal language model, and a value head if there is one, that computes log-probs of given targets.

    Args:
        language_model: from `load_language_model`.
        temperature: sampling temperature; log-probs are those of the sampling distribution.
        chunk_tokens: trained tokens whose logits exist at once.
        fp32_head: logits in fp32 whatever the dtype.
        with_entropy: compute the entropy of every trained position too.
        with_values: add a linear value head on the last hidden state.
        compute_dtype: dtype of the matrix products; parameters may be wider.
        tf32: fp32 products of the body are in TF32 on a GPU; those of an fp32 head and of positions stay exact.
        served_dtype: of the weights in the servers; see `served_values.py`.
    """

    def __init__(
        self,
        language_model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        fp32_head: bool = True,
        with_entropy: bool = False,
        with_values: bool = False,
        compute_dtype: torch.dtype = torch.float32,
        tf32: bool = False,
        served_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.fp32_head = fp32_head
        self.with_entropy = with_entropy
        self.compute_dtype = compute_dtype
        self.tf32 = tf32
        self.served_dtype = served_dtype
        #: peft's configuration, set by `lora.add_adapters`; None: all weights are trained.
        self.adapter_config: Any = None
        #: Servers have the frozen model themselves and get the adapter alone.
        self.sends_adapter = False
        self.has_linear_head = has_linear_head(language_model)
        self.value_head: torch.nn.Linear | None = None
        if with_values:
            hidden_size = language_model.config.get_text_config().hidden_size
            self.value_head = torch.nn.Linear(hidden_size, 1, dtype=torch.float32)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        if tf32:
            for module in language_model.modules():
                if "Rotary" in type(module).__name__:
                    keep_exact(module)

    @property
    def attention(self) -> str:
        return str(self.language_model.config._attn_implementation)

    def products(self) -> AbstractContextManager[None]:
        """Where the body's products are computed, in the forward pass and around every backward pass."""
        return fp32_products("tf32") if self.tf32 else nullcontext()

    def layout_of(self, batch: MicroBatch) -> Layout | None:
        """Index tensors for our own attentions (None for the others). Build it before moving `batch` to a GPU."""
        if self.attention not in OWN_ATTENTIONS or batch.attention_mask is not None:
            return None
        lengths = torch.unique_consecutive(batch.segment_ids[0], return_counts=True)[1].tolist()
        return varlen_layout(lengths) if self.attention == VARLEN_ATTENTION else segment_layout(lengths)

    def placed(self, batch: MicroBatch, device: torch.device) -> tuple[MicroBatch, Layout | None]:
        """`batch` and its layout on `device`, from where `forward` takes them."""
        layout = self.layout_of(batch)
        return batch.to(device), None if layout is None else layout.to(device)

    def forward(
        self, batch: MicroBatch, layout: Layout | None = None, temperature: float | None = None
    ) -> PolicyOutputs:
        """Log-probs of `batch.targets` at `temperature` (None: the sampling temperature)."""
        temperature = temperature or self.temperature
        inputs: dict[str, object] = {"position_ids": batch.position_ids, "use_cache": False}
        if self.attention in OWN_ATTENTIONS:
            # Right padding needs no mask under causal attention: real tokens never look at what follows them.
            inputs["segment_layout"] = layout
        else:
            inputs["attention_mask"] = batch.attention_mask
        device_type = batch.input_ids.device.type
        with self.products(), torch.autocast(device_type, torch.bfloat16, enabled=self._needs_autocast()):
            if not self.has_linear_head:
                return self._from_logits(batch, inputs, temperature)
            hidden = backbone(self.language_model)(input_ids=batch.input_ids, **inputs)[0]
        head = self.language_model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        # A head that is not exact has to be as inexact in forward as in backward, which computes its logits again.
        with self.products():
            logprobs, entropy = token_logprobs(
                hidden.to(self.compute_dtype),
                head.weight.to(self.compute_dtype),
                batch.targets,
                temperature,
                self.chunk_tokens,
                self.with_entropy,
                head_bias=bias,
                fp32_head=self.fp32_head,
                rows=batch.trained,
            )
        return PolicyOutputs(logprobs, entropy, self._values(hidden))

    def _from_logits(self, batch: MicroBatch, inputs: dict[str, object], temperature: float) -> PolicyOutputs:
        """For families that scale or cap their logits: the model's own head, with all logits."""
        outputs = self.language_model(
            input_ids=batch.input_ids, output_hidden_states=self.value_head is not None, **inputs
        )
        logprobs, entropy = logprobs_from_logits(outputs.logits, batch.targets, temperature, self.with_entropy)
        hidden = outputs.hidden_states[-1] if self.value_head is not None else outputs.logits
        return PolicyOutputs(logprobs, entropy, self._values(hidden))

    def _values(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if self.value_head is None:
            return None
        values: torch.Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))
        return values.squeeze(-1).float()

    def _needs_autocast(self) -> bool:
        """fp32 master weights with bf16 products; sharded backends cast by themselves."""
        parameter = next(self.language_model.parameters())
        return self.compute_dtype == torch.bfloat16 and parameter.dtype == torch.float32


def backbone(language_model: PreTrainedModel) -> torch.nn.Module:
    """The decoder without its output head."""
    return language_model.base_model


def has_linear_head(language_model: PreTrainedModel) -> bool:
    """Whether logits are exactly `hidden @ weight.T + bias`, without scaling or soft-capping, by the configuration, and
    there is a decoder to get `hidden` from.

    `find_fault` tries it.
    """
    if language_model.base_model is language_model:
        return False
    config = language_model.config.get_text_config()
    special = (
        *("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale"),
        "lm_head_multiplier",
    )
    return all(getattr(config, name, None) in (None, 1, 1.0) for name in special)
