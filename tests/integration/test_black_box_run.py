"""A whole run of an agent that only knows the OpenAI client, against real vLLM, through the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.whole_run import WholeRun

from pipelinerl.tiny.build import build_tiny_model

STEPS = 3
AGENT = """
import openai

from pipelinerl.agents import black_box


def load_problems(dataset_names):
    return [{"id": f"{name}-{i}", "dataset": name, "word": i} for name in dataset_names for i in range(16)]


async def rollout(base_url, api_key, problem):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": f"Say {problem['word']}"}]
        first = await client.chat.completions.create(model="actor", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "Again"}]
        second = await client.chat.completions.create(model="actor", messages=messages)
    return float(len(second.choices[0].message.content or "") % 2), {"words": 2}


generate_rollout = black_box(rollout)
"""
CONFIG = f"""
defaults:
  - quickstart
  - _self_

actor:
  rollout_policy: my_agent.generate_rollout
  llm_max_rollouts: 16
  test_samples: 16
dataset_loader: my_agent.load_problems
dataset_loader_params: null
train_dataset_names: [train]
test_dataset_names: [test]
attempts: 4
max_lag: 32
llm:
  parameters:
    max_tokens: 8
finetune:
  train_batch_size: 1
  gradient_accumulation_passes: 32
  max_train_steps: {STEPS}
vllm_config:
  vllm_kwargs:
    max_model_len: 256
    max-num-seqs: 16
"""


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_black_box_agent_trains(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    task_dir = tmp_path / "task"
    task_dir.mkdir()
    (task_dir / "my_agent.py").write_text(AGENT)
    (task_dir / "even_task.yaml").write_text(CONFIG)
    model = build_tiny_model(tmp_path / "model", seed=3, warmup=None, progress=lambda line: None)
    run = WholeRun(task_dir, tmp_path / "run", model)
    result = run.run(timeout_s=1200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    summary = run.summary
    assert summary["status"] == "completed" and summary["steps"] == STEPS
    assert summary["logprob_abs_diff_mean"] < 1e-3
    assert {record["reason"] for record in run.records("fates") if record["fate"] == "failed"} == set()
    samples = [sample for batch in run.records("training_data") for sample in batch["samples"]]
    # One growing sample a rollout: the second request continues the first.
    assert samples and all(sample["metadata"]["turns"] == 2 for sample in samples)
    for sample in samples:
        trained = [label for label in sample["labels"] if label != -100]
        assert len(trained) == len(sample["logprobs"]) == sample["output_tokens"]
