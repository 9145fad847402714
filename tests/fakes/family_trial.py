"""One try of a family: a tiny random model that is trained, exported, opened again and served.

The families are those of the table in docs/families.md, in shapes that vLLM's kernels for CPUs have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fakes.families import EXPERTS, model_of
from fakes.random_model import perturb, save_tokenizer
from fakes.vllm_process import VLLMProcess
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.model import fix_frequencies, load_policy
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.packing_check import token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import check_checkpoint
from pipelinerl.records import IGNORED_LABEL
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.source import saved_buffers
from pipelinerl.weights.sync import WeightPublisher
from pipelinerl.weights.verify import ProbeSequence

CPU = torch.device("cpu")
VOCABULARY = 200
#: Beyond windows, chunks and the original lengths of ropes.
IDS = [
    [(7 * k + 3) % 197 + 3 for k in range(80)],
    [3, 9],
    [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 41, 12],
    [(11 * k * k + 5 * k) % 197 + 3 for k in range(37)],
]
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
DELTA_NET: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    layer_types=["linear_attention", "full_attention"],
)
MLA: dict[str, Any] = dict(
    q_lora_rank=16,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    num_key_value_heads=2,
)
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_d_state=16,
    mamba_n_groups=1,
    mamba_expand=2,
    mamba_d_conv=4,
    mamba_chunk_size=32,
)
WINDOW: dict[str, Any] = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
LONGROPE: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=100.0,
    short_factor=[1.0 + 0.1 * k for k in range(16)],
    long_factor=[2.0 + 0.5 * k for k in range(16)],
)
DYNAMIC: dict[str, Any] = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)
TABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": dict(sliding_window=16, query_pre_attn_scalar=32),
    "gemma3_text": dict(sliding_window=16, query_pre_attn_scalar=32),
    "gemma4_text": dict(
        **WINDOW,
        global_head_dim=32,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
    "phi": {},
    "phi3": {},
    "phi3 (longrope)": dict(original_max_position_embeddings=32, rope_parameters=LONGROPE),
    "llama (dynamic)": dict(max_position_embeddings=64, rope_parameters=DYNAMIC),
    "olmo": {},
    "olmo2": {},
    "olmo3": dict(**WINDOW),
    "granite": dict(logits_scaling=2.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1),
    "cohere": {},
    "cohere2": dict(**WINDOW),
    "glm": dict(partial_rotary_factor=0.5),
    "glm4": dict(partial_rotary_factor=0.5),
    "starcoder2": dict(residual_dropout=0.1, embedding_dropout=0.1),
    "stablelm": {},
    "gpt2": dict(n_embd=64, n_layer=2, n_head=2),
    # It has no key and value heads of its own, but vLLM would believe their number.
    "gpt_neox": dict(rotary_pct=0.5, num_key_value_heads=2),
    "gpt_bigcode": dict(n_embd=64, n_layer=2, n_head=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=64, dropout=0.1),
    "seed_oss": dict(residual_dropout=0.1),
    "exaone4": dict(**WINDOW),
    "smollm3": {},
    "apertus": {},
    "nemotron": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "helium": {},
    "persimmon": {},
    "ministral3": {},
    "qwen3_moe": dict(**EXPERTS),
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=32),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(**EXPERTS),
    "deepseek_v2": dict(**EXPERTS, **MLA, n_group=1, topk_group=1, first_k_dense_replace=1),
    "deepseek_v3": dict(
        head_dim=64,
        **EXPERTS,
        **MLA,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
    ),
    "glm4_moe": dict(**EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1),
    "glm4_moe_lite": dict(
        **EXPERTS,
        **MLA,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    "dots1": dict(**EXPERTS, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0),
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "granitemoeshared": dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32),
    "minimax_m2": dict(scoring_func="sigmoid", num_local_experts=4, num_experts_per_tok=2, rotary_dim=16),
    "gpt_oss": dict(**WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_next": dict(**EXPERTS, **DELTA_NET, shared_expert_intermediate_size=32),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "lfm2_moe": dict(**EXPERTS, conv_dim=64, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "flex_olmo": dict(**EXPERTS),
    "afmoe": dict(**EXPERTS, **WINDOW, num_dense_layers=1),
    "exaone_moe": dict(**EXPERTS, **WINDOW, first_k_dense_replace=1),
    "jamba": dict(
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "llama4_text": dict(
        num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64, moe_layers=[1], attention_chunk_size=16
    ),
    "qwen3_5_moe_text": dict(**EXPERTS, **DELTA_NET, shared_expert_intermediate_size=32),
    "solar_open": dict(**EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1),
    "qwen3_5_text": dict(**DELTA_NET),
    "lfm2": dict(conv_dim=64, layer_types=["conv", "full_attention"]),
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "mamba2": dict(intermediate_size=128, num_heads=4, head_dim=32, state_size=16, n_groups=1, chunk_size=32),
    "granitemoehybrid": dict(
        **MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"],
    ),
    "bamba": dict(**MAMBA, attn_layer_indices=[1], attn_rotary_emb=16),
    "falcon_h1": dict(
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
        lm_head_multiplier=0.3,
    ),
    "nemotron_h": dict(
        hybrid_override_pattern="M*",
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=32,
        layers_block_type=["mamba", "attention"],
    ),
    "olmo_hybrid": dict(**DELTA_NET),
}


class Trial:
    """A family that is trained the way a run would train it.

    Args:
        family: a key of `TABLE`.
        folder: for models.

    Attributes:
        packed: samples share rows; else each has its own.

    Raises:
        ConfigError: it cannot be trained.
    """

    def __init__(self, family: str, folder: Path) -> None:
        kind = family.partition(" ")[0]
        self._folder = folder
        source = folder / "model"
        model_of(AutoConfig.for_model(kind, **{**SHAPE, **TABLE[family]})).save_pretrained(source)
        save_tokenizer(source)
        self.packed = True
        try:
            self._open(source)
        except ConfigError as error:
            if error.key != "finetune.seq_packing":
                raise
            self.packed = False
            self._open(source)

    def _open(self, source: Path) -> None:
        settings = dict(seq_packing=self.packed, train_batch_size=1, learning_rate=1e-2)
        config = RunConfig(output_dir=str(self._folder), model_path=str(source), finetune=settings)
        self.policy: PolicyModel = load_policy(config, CPU)
        self.backend = PlainBackend(self.policy, config.finetune, Ranks())
        check_checkpoint(self.backend, str(source))

    def _rows(self) -> Iterator[Sequence[Sequence[int]]]:
        yield from [IDS] if self.packed else [[ids] for ids in IDS]

    def logprobs(self) -> list[list[float]]:
        """By the path of training, one fewer than ids."""
        found = []
        for row in self._rows():
            batch = token_batch(row, CPU)
            with torch.no_grad():
                values = self.policy(*self.policy.placed(batch, CPU)).logprobs[batch.targets != IGNORED_LABEL]
            found += [part.tolist() for part in values.split([len(ids) - 1 for ids in row])]
        return found

    def step(self) -> float:
        """One step of the optimizer; the norm of its gradient."""
        for row in self._rows():
            outputs = self.backend.forward(*self.policy.placed(token_batch(row, CPU), CPU))
            self.backend.backward(-outputs.logprobs.mean(), is_last=True)
        return self.backend.step()

    def export(self) -> Path:
        exporter = ModelExporter(self._folder, str(self._folder / "model"), Ranks())
        return exporter.export(1, self.policy, self.backend.export_source())

    def change_all(self) -> None:
        """Another value for every parameter and saved buffer."""
        perturb(self.policy.language_model, seed=2)
        for number, (_, buffer) in enumerate(saved_buffers(self.policy.language_model)):
            buffer.add_(0.05 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(number)))

    def served(self, model: Path) -> Iterator[tuple[float, float | None]]:
        """Largest |log-prob difference| to a server of `model`: with its own weights, and after two updates, each with
        the difference right before it."""
        log, kwargs = self._folder / "server.log", {"max_model_len": 128}
        with VLLMProcess(model, log, kwargs) as server, WeightPublisher(server.token, timeout_s=60) as publisher:
            publisher.connect([ServerAddress("tiny", server.url)])

            def difference() -> float:
                expected = [ProbeSequence(ids, own) for ids, own in zip(IDS, self.logprobs(), strict=True)]
                return publisher.probe(expected).max_abs_diff

            yield difference(), None
            for version, change in enumerate((self.step, self.change_all), start=1):
                change()
                before = difference()
                report = publisher.publish(version, self.backend.weight_source(torch.float32))
                assert report.failed == {}
                yield difference(), before


def reopened_difference(model: Path, expected: list[list[float]]) -> float:
    """Largest |log-prob difference| of what transformers makes of the folder `model`.

    By itself it would choose some frequencies by the length of a sample, which no server does.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    fix_frequencies(loaded, None)
    largest = 0.0
    for ids, ours in zip(IDS, expected, strict=True):
        with torch.no_grad():
            logprobs = loaded(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        theirs = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        largest = max(largest, float((theirs - torch.tensor(ours)).abs().max()))
    return largest
