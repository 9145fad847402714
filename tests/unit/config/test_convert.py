"""Files of PipelineRL are translated once, with a line for each key that changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipelinerl.__main__ import main
from pipelinerl.config.compose import compose
from pipelinerl.config.convert import Conversion

OLD = """
defaults:
  - base
  - override finetune: gspo
  - override streams: redis
  - _self_
finetune:
  attempts: 16
  seq_parallel: 1
  valid_batch_size: 4
  load_as_bf16: false
  model_class: causal-language-modeling
  rl: {epsilon_low: 0.001, clamp: 5.0, temperature: "${llm.parameters.temperature}", aggregate_loss: sum}
actor: {problem_queue_size: 64, rollout_policy: my.rollout}
dataset_loader: my.load
streams: {host: localhost, port: 11000}
llm: {parameters: {max_tokens: 512, temperature: 0.7}}
use_deepspeed: true
deepspeed_config: deepspeed_stage2_bf16
world: {replicas: 1, actor_fraction: 2}
me: {job_idx: 1}
"""


def converted(text: str) -> tuple[dict[str, object], list[str], bool]:
    conversion = Conversion(yaml.safe_load(text))
    return conversion.run(), conversion.lines, conversion.failed


def test_a_converted_file_composes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    assert main(["convert", str(tmp_path / "old.yaml")]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "new.yaml").write_text(out)
    config = compose(["--config-dir", str(tmp_path), "--config-name=new", "output_dir=x"]).config
    assert config is not None
    assert (config.attempts, config.finetune.dtype, config.llm.parameters.temperature) == (16, "fp32", 0.7)
    assert (config.backend.type, config.backend.config) == ("deepspeed", "deepspeed_stage2_bf16")
    assert (config.streams.backend, config.streams.url) == ("redis", "redis://localhost:11000/0")
    assert (config.finetune.rl.policy_loss, config.finetune.rl.loss.epsilon_low) == ("gspo", 0.001)
    said = {line.split()[1].rstrip(":,") for line in err.splitlines()}
    assert {"finetune.attempts", "finetune.valid_batch_size", "finetune.rl.clamp", "me", "streams.host"} <= said


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("finetune: {seq_parallel: 4}", "finetune.seq_parallel"),
        ("finetune: {model_class: vision2seq}", "finetune.model_class"),
        ("attempts: 4\nfinetune: {attempts: 8}", "finetune.attempts"),
        ("finetune: {seq_lenght: 4}", "finetune.seq_lenght"),
        ("actor: {domain_mix: {math: 1}}", "actor.domain_mix"),
    ],
)
def test_what_cannot_be_translated_is_said(text: str, key: str) -> None:
    _, lines, failed = converted(text)
    assert failed and [line.split()[1].rstrip(":") for line in lines if line.startswith("cannot")] == [key]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "use_fsdp: true\nuse_deepspeed: false\nfsdp: {param_dtype: bf16, buffer_dtype: fp32}",
            {"backend": {"type": "fsdp", "param_dtype": "bf16"}},
        ),
        ("use_deepspeed: false", {"backend": {"type": "plain"}}),
        ("finetune: {rl: {use_advantages: false}}", {"finetune": {"rl": {"advantage_estimator": "reinforce"}}}),
        (
            "finetune: {rl: {algo: ppo, epsilon: 0.1}}",
            {"finetune": {"rl": {"policy_loss": "ppo", "epsilon_low": 0.1, "epsilon_high": 0.1}}},
        ),
        ("vllm_config: {quantization: bf16_last_layer_fp32}", {"fp32_lm_head": True}),
        ("finetune: {use_wandb: false}", {"wandb": {"mode": "disabled"}}),
        (
            "wandb: {use_wandb: true, wandb_id: a}\nactor: {task_prompt: p}",
            {"wandb": {"wandb_id": "a"}, "custom": {"task_prompt": "p"}},
        ),
        (
            "finetune: {seed: '${..seed}', rl: {aggregate_loss: mean}}",
            {"finetune": {"rl": {"aggregation": "sample_mean"}}},
        ),
        (
            "rewards: {buffer_tokens: 64}",
            {"rewards": {"buffer_tokens": 64, "components": {"outcome": 1.0, "soft_length": 1.0}}},
        ),
        ("finetune: {rl: {epsilon_low: 0.1, epsilon_high: 0.1}}", {"finetune": {"rl": {"clamp": 1.1}}}),
        ("max_lag: ${finetune.attempts}", {"max_lag": "${attempts}"}),
        ("max_tests_per_problem: 4", {}),
        (
            "max_tests_per_problem: 4\ndataset_loader: pipelinerl.domains.coding.load_problems\n"
            "dataset_loader_params: {max_tests_per_problem: '${max_tests_per_problem}'}",
            {"dataset_loader": "pipelinerl.domains.coding.load_problems", "dataset_loader_params": {"max_tests": 4}},
        ),
    ],
)
def test_keys_that_are_written_another_way(text: str, expected: dict[str, object]) -> None:
    data, _, failed = converted(text)
    assert not failed
    assert data == expected
