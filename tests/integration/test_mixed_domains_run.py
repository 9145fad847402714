"""A mix of two domains with the settings of the quickstart: shares as configured, held-out metrics for each domain."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from fakes.whole_run import WholeRun

from pipelinerl.tiny.build import build_tiny_model

WEIGHTS = {"guessing": 0.75, "counting": 0.25}
STEPS = 8
CONFIG = f"""
defaults:
  - quickstart
  - _self_

actor:
  rollout_policy: pipelinerl.domains.multi.generate_multi_rollout
  test_samples: 128
dataset_loader: pipelinerl.domains.multi.load_problems
dataset_loader_params:
  domains:
    guessing:
      weight: 3
      params: {{n: 16, max_turns: 4, opening_guesses: 2, num_train: 700, num_test: 64}}
    counting:
      weight: 1
      params: {{num_train: 100, num_test: 64}}
vllm_config:
  vllm_kwargs:
    # The tiny model's tokenizer writes questions of counting letter by letter.
    max_model_len: 1024
finetune:
  max_train_steps: {STEPS}
"""
# Of the quickstart's own loader.
WITHOUT = [f"~dataset_loader_params.{key}" for key in ("n", "max_turns", "opening_guesses", "num_train", "num_test")]


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_shares_and_held_out_metrics(tmp_path: Path) -> None:
    task_dir = tmp_path / "task"
    task_dir.mkdir()
    (task_dir / "even_task.yaml").write_text(CONFIG)
    model = build_tiny_model(tmp_path / "model", seed=3, warmup=None, progress=lambda line: None)
    run = WholeRun(task_dir, tmp_path / "run", model)
    result = run.run(*WITHOUT, timeout_s=2400)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.summary["status"] == "completed" and run.summary["steps"] == STEPS

    groups = Counter(record["dataset_name"] for record in run.records("actor"))
    assert set(groups) == set(WEIGHTS) and groups.total() > 200
    for domain, weight in WEIGHTS.items():
        assert abs(groups[domain] / groups.total() - weight) <= 0.02, groups

    evaluations = run.records("evaluation")
    for domain in ("all", *WEIGHTS):
        versions = {record["min_version"] for record in evaluations if record["dataset_name"] == domain}
        assert 0 in versions and STEPS in versions, (domain, versions)
    names = {name for line in (run.output_dir / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    for domain in WEIGHTS:
        assert any(domain in name for name in names), sorted(names)
