"""Compiled decoder layers on a GPU: gradients no further from fp32 than without, and one graph for all packs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.finetune_kit import Kit
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.finetune.attention import VARLEN_ATTENTION, candidate_implementations
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.model_check import branching_tokens, token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CUDA = torch.device("cuda", 0)


def gradient(kit: Kit, policy: PolicyModel, device: torch.device) -> torch.Tensor:
    config, ranks = kit.config(), Ranks(device=device)
    AcceleratorState._reset_state(reset_partial_state=True)
    runner = StepRunner(PlainBackend(policy, config, ranks), config, ranks)
    # Micro-batches of many samples, of one, and of none.
    plan = [[[*range(9)], [9], [*range(10, 24)], []]]
    runner.accumulate(kit.batch(kit.samples(24, 1, masked_every=9), plan=plan))
    # Prefixes that are computed once.
    batch, layout = policy.placed(token_batch(branching_tokens(policy), torch.device("cpu")), device)
    assert policy.shares_prefixes and layout is not None and layout.shared is not None
    outputs = policy(batch, layout)
    with policy.products():
        outputs.logprobs.sum().backward()
    found = torch.cat([p.grad.flatten().cpu() for p in policy.parameters() if p.grad is not None])
    policy.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": False}, {"lora": {"enabled": True, "r": 4}}])
def test_gradients_are_as_near_to_fp32_as_without(tmp_path: Path, changes: dict[str, object]) -> None:
    if candidate_implementations("auto", CUDA, torch.bfloat16)[0] != VARLEN_ATTENTION:
        pytest.skip("flash-attn is used, whose layers are not compiled")
    kit, folder = Kit(), tmp_path / "model"
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2)).save_pretrained(folder)
    kit.tokenizer(folder)

    def policy(device: torch.device) -> PolicyModel:
        return load_policy(RunConfig(output_dir=str(tmp_path), model_path=str(folder), finetune=changes), device)

    on_cpu, compiled = policy(torch.device("cpu")), policy(CUDA)
    assert compiled.has_compiled_layers
    compiled.load_state_dict(on_cpu.state_dict())
    exact = gradient(kit, on_cpu, torch.device("cpu"))
    graphs = counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("force_eager"):
        without = gradient(kit, compiled, CUDA)
    found = gradient(kit, compiled, CUDA)
    assert counters["stats"]["unique_graphs"] == graphs
    assert (found - exact).norm() < 1.2 * (without - exact).norm() + 1e-3 * exact.norm()
