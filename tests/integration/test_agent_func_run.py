"""A whole run with an agent function as users have it: module-level counters, tensors as rewards, text states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.whole_run import WholeRun

from pipelinerl.tiny.build import build_tiny_model

STEPS = 3
IMPORTS = "from typing import Any, Dict, Tuple\n\nimport torch\n\n"
# As such functions are usually shown: the annotation names three values, four are returned.
EXAMPLE = """\
step_idx = 0
max_steps = 2

async def step(state, action, label, **kwargs) -> Tuple[float, Dict[str, Any], bool]:
   global step_idx, max_steps
   # End after verification
   if step_idx >= max_steps:
      done = True
      # Generate a random reward using torch.rand
      reward = torch.rand(1)
      next_state = state + action + " The answer is correct. <|endoftext|>"
   else:
      done = False
      reward = torch.tensor(0)
      # Update state
      next_state = state + action + " The answer is not correct, please try again: "
   step_idx += 1

   # Extra info
   extra_info = {}
   return reward, next_state, done, extra_info
"""
CONFIG = f"""
defaults:
  - quickstart
  - _self_

actor:
  rollout_policy: null
  agent_func_path: agent_func.py
  llm_max_rollouts: 16
  test_samples: 16
dataset_loader: null
agent:
  prompt_data: prompts.jsonl
  eval_data: prompts.jsonl
  input_key: context_messages
  apply_chat_template: true
  prompt_max_len: 64
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


def make_agent_run(folder: Path) -> WholeRun:
    task_dir = folder / "task"
    task_dir.mkdir()
    (task_dir / "agent_func.py").write_text(IMPORTS + EXAMPLE)
    (task_dir / "even_task.yaml").write_text(CONFIG)
    prompts = [{"context_messages": [{"role": "user", "content": f"Say {number}"}]} for number in range(16)]
    (task_dir / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    model = build_tiny_model(folder / "model", seed=3, warmup=None, progress=lambda line: None)
    return WholeRun(task_dir, folder / "run", model)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_example_trains(tmp_path: Path) -> None:
    run = make_agent_run(tmp_path)
    result = run.run(timeout_s=1200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    summary = run.summary
    assert summary["status"] == "completed" and summary["steps"] == STEPS
    assert summary["logprob_abs_diff_mean"] < 1e-3
    assert {record["reason"] for record in run.records("fates") if record["fate"] == "failed"} == set()
    samples = [sample for batch in run.records("training_data") for sample in batch["samples"]]
    # Each rollout has a counter of its own: two steps that are not done, with reward 0, and a third that is.
    assert {sample["metadata"]["turns"] for sample in samples} == {3}
    assert all(0 < sample["reward"] < 1 for sample in samples)
    assert len({sample["reward"] for sample in samples}) > 1
    for sample in samples:
        trained = [label for label in sample["labels"] if label != -100]
        assert len(trained) == len(sample["logprobs"]) == sample["output_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("samples_a_rollout", [1, 3])
def test_passes_over_the_prompts_bound_the_run(tmp_path: Path, samples_a_rollout: int) -> None:
    """16 prompts, 4 rollouts each, 32 samples a step: a pass is 2 steps with one sample a rollout, 6 with three."""
    run = make_agent_run(tmp_path)
    if samples_a_rollout > 1:
        # A state that does not begin with the one before starts a new sample.
        file = tmp_path / "task" / "agent_func.py"
        file.write_text(file.read_text().replace("next_state = state + action + ", "next_state = f'{step_idx} ' + "))
    words = [
        "finetune.max_epochs=1",
        "agent.eval_data=null",
        "finetune.max_train_steps=40",
        "finetune.num_warmup_steps=0",
    ]
    result = run.run(*words, timeout_s=1200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    batches = run.records("training_data")[: run.summary["steps"]]
    groups = {group["id"]: group for group in run.records("actor")}
    trained = {groups[group_id]["problem_id"] for batch in batches for group_id in batch["group_ids"]}
    assert trained == {f"prompts-{number}" for number in range(16)}
    # The last step is the first one that has the end of the pass; what fills it up is of the next one.
    assert [batch["epochs_done"] >= 1 for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert len(batches) >= 2 * samples_a_rollout
    steps = [record for record in run.records("metrics") if record["source"] == "finetune_0"]
    rates = [step["values"]["finetune/learning_rate"] for step in steps if "finetune/learning_rate" in step["values"]]
    assert rates[-1] < rates[0]
