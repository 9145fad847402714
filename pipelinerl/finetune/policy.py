"""The policy as one module: token ids in, log-probs of the targets out.

The output head runs inside `PolicyModel.forward`, because sharded backends gather parameters in the hooks of the module
that they wrap. Full logits never exist. Only trained positions reach the head, a chunk at a time: `token_logprobs`
keeps two numbers per token for the backward pass (log-normalizer and entropy) and recomputes the chunk's logits there,
so peak memory is one chunk of `chunk_tokens x vocabulary` floats instead of several copies of `tokens x vocabulary`.

With z = logits / temperature, p = softmax(z), L = logsumexp(z) and H = L - sum(p * z):
    log-prob of target y: z_y - L        d/dz = onehot(y) - p
    entropy:              H              d/dz = -p * (z - L + H)

fp32 products on a GPU are exact or use inputs rounded to TF32 (10 bits of mantissa): the body may use TF32, an fp32
head is exact. The setting, `fp32_precision`, is global to the process, because autograd threads must see it, and has no
effect on a CPU. While it is TF32, `torch.get_float32_matmul_precision` raises, so nothing may be compiled inside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from subprocess import SubprocessError
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from pipelinerl.finetune.attention import (
    OWN_ATTENTIONS,
    VARLEN_ATTENTION,
    Layout,
    SharedPrefixes,
    repeated,
    segment_layout,
    shared_prefixes,
    varlen_layout,
)
from pipelinerl.records import IGNORED_LABEL
from pipelinerl.rl.microbatch import MicroBatch

logger = logging.getLogger(__name__)

LANGUAGE_MODEL = "language_model"
VALUE_HEAD = "value_head"

P = ParamSpec("P")
T = TypeVar("T")


class PolicyOutputs(NamedTuple):
    """Tensors of one micro-batch in the shape of its `targets`, fp32; 0 where nothing is trained."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    values: torch.Tensor | None


class PolicyModel(torch.nn.Module):
    """A causal language model, with an optional value head, that computes log-probs of given targets.

    Args:
        temperature: sampling temperature; log-probs are those of the sampling distribution.
        chunk_tokens: trained tokens whose logits exist at once.
        fp32_head: logits in fp32 whatever the dtype.
        with_entropy: compute the entropy of every trained position too.
        with_values: add a linear value head on the last hidden state.
        compute_dtype: dtype of the matrix products; parameters may be wider.
        tf32: fp32 products of the body are in TF32 on a GPU; those of an fp32 head and of positions stay exact.
        served_dtype: of the weights in the servers; see `served_weights.py`.
        shares_prefixes: compute a prefix that samples of a row have in common only once; right if nothing but attention
            mixes tokens (`model.find_fault` turns it off for other models).
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
        shares_prefixes: bool = False,
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
        self.shares_prefixes = shares_prefixes
        #: peft's configuration, set by `lora.add_adapters`; None: all weights are trained.
        self.adapter_config: Any = None
        #: Servers have the frozen model themselves and get the adapter alone.
        self.sends_adapter = False
        #: Set by `compiled_layers.compile_layers`; None: not tried.
        self.has_compiled_layers: bool | None = None
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

    @property
    def can_share_prefixes(self) -> bool:
        """Whether rows are computed so. A head that is not linear makes logits of all positions anyway."""
        return self.shares_prefixes and self.has_linear_head and self.attention in OWN_ATTENTIONS

    def products(self) -> AbstractContextManager[Any]:
        """Precision of the body: a context for the forward pass and around every backward pass."""
        if self.has_compiled_layers and not torch.is_grad_enabled():
            return torch.compiler.set_stance("force_eager")
        return fp32_products("tf32" if self.tf32 else None)

    def layout_of(self, batch: MicroBatch, may_share: bool = True) -> Layout | None:
        """Index tensors for our own attentions (others: None), with prefixes shared only if `may_share`. Call it before
        moving `batch` to a GPU."""
        if self.attention not in OWN_ATTENTIONS or batch.attention_mask is not None:
            return None
        lengths = torch.unique_consecutive(batch.segment_ids[0], return_counts=True)[1].tolist()
        shared = shared_prefixes(batch.input_ids[0], lengths) if may_share and self.can_share_prefixes else None
        make = varlen_layout if self.attention == VARLEN_ATTENTION else segment_layout
        return make(lengths, shared)

    def placed(
        self, batch: MicroBatch, device: torch.device, may_share: bool = True
    ) -> tuple[MicroBatch, Layout | None]:
        """`batch` and its layout on `device`, for `forward`."""
        layout = self.layout_of(batch, may_share)
        return batch.to(device), None if layout is None else layout.to(device)

    def forward(
        self, batch: MicroBatch, layout: Layout | None = None, temperature: float | None = None
    ) -> PolicyOutputs:
        """Log-probs of `batch.targets` at `temperature` (None: the sampling temperature)."""
        temperature = temperature or self.temperature
        shared = None if layout is None else layout.shared
        ids, positions = batch.input_ids, batch.position_ids
        if shared is not None:
            ids, positions = shared.reduced(ids), shared.reduced(positions)
        inputs: dict[str, object] = {"position_ids": positions, "use_cache": False}
        if self.attention in OWN_ATTENTIONS:
            # Right padding needs no mask under causal attention: real tokens never attend to what follows.
            inputs["segment_layout"] = layout
        else:
            inputs["attention_mask"] = batch.attention_mask
        device_type = batch.input_ids.device.type
        # Cast weights are cached for the backward pass; without one, they would accumulate.
        kept = torch.is_grad_enabled()
        autocast = torch.autocast(device_type, torch.bfloat16, enabled=self._needs_autocast(), cache_enabled=kept)
        with self.products(), autocast:
            if not self.has_linear_head:
                return self._from_logits(batch, inputs, temperature)
            hidden = backbone(self.language_model)(input_ids=ids, **inputs)[0]
        head = self.language_model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        # A head that is not exact must be equally inexact in forward and backward, which recomputes its logits.
        with fp32_products("tf32" if self.tf32 else None):
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
                source=None if shared is None else shared.source,
            )
        return PolicyOutputs(logprobs, entropy, self._values(hidden, shared))

    def _from_logits(self, batch: MicroBatch, inputs: dict[str, object], temperature: float) -> PolicyOutputs:
        """For models that scale or cap their logits: their own head, with full logits."""
        outputs = self.language_model(
            input_ids=batch.input_ids, output_hidden_states=self.value_head is not None, **inputs
        )
        logprobs, entropy = logprobs_from_logits(outputs.logits, batch.targets, temperature, self.with_entropy)
        hidden = outputs.hidden_states[-1] if self.value_head is not None else outputs.logits
        return PolicyOutputs(logprobs, entropy, self._values(hidden))

    def _values(self, hidden: torch.Tensor, shared: SharedPrefixes | None = None) -> torch.Tensor | None:
        if self.value_head is None:
            return None
        values: torch.Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))
        return (values if shared is None else shared.restored(values)).squeeze(-1).float()

    def _needs_autocast(self) -> bool:
        """fp32 master weights with bf16 products; sharded backends cast themselves."""
        parameter = next(self.language_model.parameters())
        return self.compute_dtype == torch.bfloat16 and parameter.dtype == torch.float32


def backbone(language_model: PreTrainedModel) -> torch.nn.Module:
    """The decoder without its output head."""
    return language_model.base_model


def decoder_layers(policy: PolicyModel) -> list[torch.nn.Module]:
    """The repeated blocks of the model: its longest `ModuleList`; empty if it has none."""
    modules = backbone(policy.language_model).modules()
    return max(([*module] for module in modules if isinstance(module, torch.nn.ModuleList)), key=len, default=[])


def has_linear_head(language_model: PreTrainedModel) -> bool:
    """Whether, by the configuration, logits are exactly `hidden @ weight.T + bias`, without scaling or soft-capping,
    and a decoder returns `hidden`. `find_fault` verifies it."""
    if language_model.base_model is language_model:
        return False
    config = language_model.config.get_text_config()
    keys = ["final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier"]
    return all(getattr(config, key, None) in (None, 1, 1.0) for key in keys)


def token_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    head_bias: torch.Tensor | None = None,
    fp32_head: bool = True,
    rows: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `targets` under `softmax(hidden @ head_weight.T / temperature)`.

    Args:
        hidden: [..., D] final hidden states (after the last norm), any float dtype.
        head_weight: [V, D] output head.
        targets: [...] int64; -100 is skipped: its log-prob and entropy are 0 and it gives no gradient.
        temperature: sampling temperature, > 0.
        chunk_tokens: rows whose logits exist at once.
        with_entropy: also return the entropy (nats) of the whole distribution at every trained position.
        head_bias: [V] or None.
        fp32_head: logits are accumulated and kept in fp32, never in TF32. False: the product is rounded to the inputs'
            dtype first, as a model with a bf16 head does (fp32 inputs use TF32 where it is allowed). Softmax always is
            in fp32 (or fp64).
        rows: [N] int64, flat positions of the targets that are not -100. None: computed, which synchronizes with a GPU.
        source: [positions] int64, where in `hidden` each flat position is; None: at the same place.

    Returns:
        (log-probs, entropy or None), float32 (float64 for float64 inputs), shape of `targets`.
    """
    if rows is None:
        rows = (targets.reshape(-1) != IGNORED_LABEL).nonzero(as_tuple=True)[0]
    # Prompts and padding never reach the head: only trained rows are selected.
    flat = hidden.reshape(-1, hidden.shape[-1])
    picked = flat[rows] if source is None else repeated(flat, source[rows])
    logprobs, entropy = _FusedHead.apply(  # type: ignore[no-untyped-call]
        picked, head_weight, head_bias, targets.reshape(-1)[rows], temperature, chunk_tokens, with_entropy, fp32_head
    )
    return _spread(logprobs, rows, targets), _spread(entropy, rows, targets) if with_entropy else None


def logprobs_from_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropy) from full logits [..., V], for models whose head is not linear."""
    log_p = torch.log_softmax(logits.to(_wide(logits.dtype)) / temperature, dim=-1)
    trained = targets != IGNORED_LABEL
    picked = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    logprobs = torch.where(trained, picked, 0.0)
    if not with_entropy:
        return logprobs, None
    return logprobs, torch.where(trained, -(log_p.exp() * log_p).sum(-1), 0.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spread(values: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(like.numel()).index_copy(0, rows, values).reshape(like.shape)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Product accumulated and returned in fp32 (fp64). On CUDA, half-precision operands are not converted: tensor cores
    multiply them exactly and add in fp32, so no fp32 copy of the head is made."""
    wide = _wide(left.dtype)
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16) and right.dtype == left.dtype:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def compiled_on_gpus(function: Callable[P, T]) -> Callable[P, T]:
    """`function` of a chunk of logits, compiled on GPUs: run eagerly, each of its operations reads and writes the whole
    chunk, and together they take longer than the matrix products around them."""
    compiled = cache(lambda: torch.compile(function, dynamic=True, fullgraph=True))
    is_broken = False

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal is_broken
        logits: Any = args[0]
        if logits.is_cuda and not is_broken:
            # Rows are dynamic: one graph serves all chunks. The vocabulary is static: loads are vectorized.
            torch._dynamo.mark_static(logits, 1)
            try:
                with fp32_products("ieee"):
                    return compiled()(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            # Mostly for want of a C compiler. The last: after eight graphs.
            except (RuntimeError, OSError, SubprocessError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                is_broken = True
                first_line = str(error).strip().partition("\n")[0]
                logger.warning("the output head is slower, because it cannot be compiled: %s", first_line)
        return function(*args, **kwargs)

    return call


class _FusedHead(torch.autograd.Function):
    """Linear head -> (log-prob, entropy) over chunks of rows, with logits recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        fp32_head: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, wide = hidden.shape[0], _wide(hidden.dtype)
        logprobs = torch.zeros(count, dtype=wide, device=hidden.device)
        log_norm, entropy = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            with fp32_products("ieee" if fp32_head else None):
                log_norm[part], logprobs[part], entropy[part] = _statistics(
                    _logits(hidden[part], weight, bias, fp32_head), targets[part], temperature, with_entropy
                )
        ctx.save_for_backward(hidden, weight, bias, targets, log_norm, entropy)
        ctx.settings = (temperature, chunk_tokens, with_entropy, fp32_head)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_norm, entropy = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy, fp32_head = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden.dtype)
        # d z / d logits, applied to vectors instead of in another pass over every chunk.
        grad_logprobs, grad_entropy = grad_logprobs / temperature, grad_entropy / temperature
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if need_bias else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            with fp32_products("ieee" if fp32_head else None):
                slope = _slope(
                    _logits(hidden[part], weight, bias, fp32_head),
                    targets[part],
                    temperature,
                    log_norm[part],
                    entropy[part],
                    grad_logprobs[part],
                    grad_entropy[part],
                    with_entropy,
                    # The bias gets the sum of slopes before they are rounded for the products.
                    wide if need_bias else hidden.dtype,
                )
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
                slope = slope.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = _matmul(slope, weight).to(hidden.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight, slope, hidden[part])
            del slope  # before the next logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fp32_head: bool) -> torch.Tensor:
    """Logits of one chunk in fp32 (fp64)."""
    logits = _matmul(hidden, weight.T) if fp32_head else (hidden @ weight.T).to(_wide(hidden.dtype))
    if bias is not None:
        logits += bias
    return logits


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """z, in place unless this is compiled: compiled code would write a new tensor, and then copy it back."""
    if torch.compiler.is_compiling():
        return logits / temperature
    return logits.div_(temperature) if temperature != 1.0 else logits


@compiled_on_gpus
def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-normalizer, log-prob of the target and entropy (else 0) of every row. May overwrite `logits`."""
    z = _scaled(logits, temperature)
    top = z.amax(-1, keepdim=True)
    z.sub_(top)
    target = z.gather(-1, targets[:, None]).squeeze(-1)
    p = z.exp()
    total = p.sum(-1)
    log_norm = total.log()
    entropy = torch.zeros_like(total)
    if with_entropy:
        # 0 * -inf would be NaN.
        entropy = log_norm - p.mul_(z.clamp_(min=-1e30)).sum(-1) / total
    return log_norm + top.squeeze(-1), target - log_norm, entropy


@compiled_on_gpus
def _slope(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    log_norm: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
    with_entropy: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient with respect to z (see the module docstring), rounded once, to `dtype`. May overwrite `logits`."""

    def slope_of(logits: torch.Tensor) -> torch.Tensor:
        log_p = _scaled(logits, temperature).sub_(log_norm[:, None])
        steep = -grad_logprobs[:, None]
        if with_entropy:
            steep = log_p.clamp_(min=-1e30).add(entropy[:, None]).mul_(-grad_entropy[:, None]).add_(steep)
        return log_p.exp_().mul_(steep)

    of_targets = slope_of(logits.gather(-1, targets[:, None])) + grad_logprobs[:, None]
    return slope_of(logits).to(dtype).scatter_(-1, targets[:, None], of_targets.to(dtype))


def _add_product(total: torch.Tensor, slope: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += slope.T @ hidden, added in fp32 (fp64)."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += _matmul(slope.T, hidden)


@contextmanager
def fp32_products(kind: str | None) -> Iterator[None]:
    """Within it, fp32 products on GPUs are exact (`ieee`), in TF32 (`tf32`), or as before (None)."""
    before = allowed_products()
    torch.backends.cuda.matmul.fp32_precision = kind or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def keep_exact(module: torch.nn.Module) -> None:
    """Always run the forward pass of `module` with exact fp32 products.

    For positions and angles: TF32 represents integers only up to 2048 exactly.
    """
    before: list[str] = []

    def enter(*_: object) -> None:
        before.append(allowed_products())
        torch.backends.cuda.matmul.fp32_precision = "ieee"

    def leave(*_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = before.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def allowed_products() -> str:
    """How fp32 products on GPUs are computed now: `tf32`, or `ieee` or `none`, which are both exact."""
    return str(torch.backends.cuda.matmul.fp32_precision)
