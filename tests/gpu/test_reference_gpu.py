"""The reference model beside the trainer on a GPU: same log-probs when it is kept in the CPU's memory between steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy, load_reference
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_an_offloaded_reference_is_the_policy_at_the_start(tmp_path: Path) -> None:
    folder, device = tmp_path / "model", torch.device("cuda", 0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2)).save_pretrained(folder)
    batch = token_batch([[1, 2, 3, 4], [5, 6, 7]], torch.device("cpu"))
    found = []
    for offload in (False, True):
        config = RunConfig(
            output_dir=str(tmp_path),
            model_path=str(folder),
            finetune={"rl": {"kl_coef": 0.1, "reference_offload": offload}},
        )
        policy = load_policy(config, device)
        reference = load_reference(config, policy, device, has_servers=False)
        assert reference is not None
        found += reference.logprobs([batch])
        assert {p.device.type for p in reference._model.parameters()} == {"cpu" if offload else "cuda"}
    # It rounds to what servers can have, as the reference is.
    PlainBackend(policy, config.finetune, Ranks(device=device))
    with torch.no_grad():
        layout = policy.layout_of(batch)
        ours = policy(batch.to(device), layout.to(device) if layout is not None else None).logprobs.cpu()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], ours)
