"""Updates of real vLLM servers of families whose checkpoints differ from the model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.families import random_model
from fakes.random_model import model_logprobs, perturb, save_tokenizer
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import make_whole_run
from safetensors.torch import load_file

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


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_whole_run_of_a_mixture_of_experts(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    vocabulary = json.loads((run.model_path / "config.json").read_text())["vocab_size"]
    model = random_model("qwen3_moe", **SHAPE, vocab_size=vocabulary, max_position_embeddings=1024, eos_token_id=2)
    model.save_pretrained(run.model_path)
    ended = run.run("finetune.max_train_steps=3")
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{run.logs()}"
    assert run.summary["status"] == "completed" and run.summary["weight_updates"] == 4
    assert run.summary["logprob_abs_diff_mean"] < TOLERANCE
    before, after = (load_file(f / "model.safetensors") for f in (run.model_path, run.output_dir / "finetune/current"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if ".experts." in name)
