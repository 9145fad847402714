"""Updates of real vLLM servers of families whose checkpoints differ from the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.families import random_model
from fakes.random_model import model_logprobs, perturb, save_tokenizer
from fakes.vllm_process import VLLMProcess

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.model import load_language_model
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.sync import WeightPublisher
from pipelinerl.weights.verify import ProbeSequence

TOLERANCE = 1e-4
IDS = [[3, 9], [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 41, 12], [(7 * k + 3) % 60 for k in range(80)]]
#: vLLM's attention on CPUs wants heads of 32.
SHAPE: dict[str, Any] = dict(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_w1_a_server_agrees_at_the_start_and_after_every_update(family: str, tmp_path: Path) -> None:
    random_model(family, **SHAPE).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    model = load_language_model(str(tmp_path / "model"), "eager").eval()
    backend = PlainBackend(PolicyModel(model), FinetuneConfig(), Ranks())
    kwargs = {"max_model_len": 128}
    with (
        VLLMProcess(tmp_path / "model", tmp_path / "server.log", kwargs) as server,
        WeightPublisher(server.token, timeout_s=60) as publisher,
    ):
        publisher.connect([ServerAddress("tiny", server.url)])

        def difference() -> float:
            return publisher.probe([ProbeSequence(ids, model_logprobs(model, ids)) for ids in IDS]).max_abs_diff

        assert difference() < TOLERANCE
        for version in (1, 2):
            perturb(model, seed=version)
            # The old weights must be told apart, or the test proves nothing.
            assert difference() > 100 * TOLERANCE
            assert publisher.publish(version, backend.weight_source(torch.float32)).failed == {}
            assert difference() < TOLERANCE
