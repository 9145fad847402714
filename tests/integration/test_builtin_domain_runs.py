"""Every built-in domain trains three steps with the real parts on a CPU: those of one turn in one run, in a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.whole_run import WholeRun

ROOT = Path(__file__).parents[2]
STEPS = 3
FEW = {"num_train": 40, "num_test": 8}
MIXED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("counting", "countdown", "math", "ifeval"), FEW),
    "fn_calling": {**FEW, "num_tools": 2, "max_calls": 1},
    "tir": {**FEW, "max_programs": 1},
    "coding": {"num_train": 20, "num_test": 4},
    "logic": {**FEW, "families": ["leg_counting", "spell_backward", "number_sorting"]},
}
CASES: dict[str, dict[str, Any]] = {
    "guessing": {"n": 16, "max_turns": 3, "num_train": 40, "num_test": 8},
    "textarena": {**FEW, "env_id": "GuessTheNumber-v0", "max_turns": 3},
    "verifiers": {
        "env_id": "verifiers.envs.integrations.reasoninggym_env.ReasoningGymEnv",
        "env_args": {"gym": "leg_counting", "num_train_examples": 40, "num_eval_examples": 8},
    },
    "gymnasium_text": {
        **FEW,
        "env_id": "FrozenLake-v1",
        "env_kwargs": {"is_slippery": False},
        "action_names": ["left", "down", "right", "up"],
        "max_turns": 3,
    },
    "multi": {"domains": {name: {"weight": 1, "params": params} for name, params in MIXED.items()}},
}
# What needs more than the actor: a service that plays or grades, and an evaluation of every domain.
SERVICES: dict[str, tuple[str, ...]] = {
    "gymnasium_text": ("environment={_target_: pipelinerl.games.create_app, processes: 1}", "world.env_replicas=1"),
    "multi": ("world.verifier_replicas=1", "verifier.processes=1", "actor.test_samples=76"),
}
CPU_SETTINGS = """
defaults: [base, {override world: cpu}, _self_]
seed: 1
attempts: 4
max_lag: 32
eval_every_n_versions: 0
actor: {llm_max_rollouts: 16, test_samples: 16}
llm: {parameters: {max_tokens: 16}}
vllm_config: {vllm_kwargs: {dtype: float32, enforce-eager: "", max_model_len: 1024, block-size: 32, max-num-seqs: 16}}
finetune: {dtype: fp32, train_batch_size: 1, gradient_accumulation_passes: 32, seq_length: 2048,
           gradient_checkpointing: false, learning_rate: 1.0e-4, max_train_steps: 3, save_checkpoint_steps: 1000}
"""


def make_run(folder: Path, case: str) -> WholeRun:
    from pipelinerl.tiny.build import build_tiny_model

    shipped = yaml.safe_load((ROOT / "conf" / f"{case}.yaml").read_text())
    settings = yaml.safe_load(CPU_SETTINGS)
    settings["actor"] |= shipped["actor"]
    settings |= {key: shipped[key] for key in ("dataset_loader", "train_dataset_names", "test_dataset_names")}
    settings["dataset_loader_params"] = CASES[case]
    (folder / "task").mkdir(parents=True)
    (folder / "task" / "even_task.yaml").write_text(yaml.safe_dump(settings))
    model = build_tiny_model(folder / "model", seed=3, warmup=None, progress=lambda line: None)
    return WholeRun(folder / "task", folder / "run", model)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_three_steps(case: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, case)
    result = run.run(*SERVICES.get(case, ()), timeout_s=1200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.summary["status"] == "completed" and run.summary["steps"] == STEPS
    failed = {record["reason"] for record in run.records("fates") if record["fate"] == "failed"}
    assert not failed, run.logs()
    assert run.living_processes() == []
    evaluations = run.records("evaluation")
    assert evaluations and all(record["num_failed"] == 0 for record in evaluations)
    if case == "multi":
        # Families of `logic` are data sets of their own.
        assert {record["dataset_name"].split("/")[0] for record in evaluations} == {"all", *MIXED}
        assert {record["dataset_name"].split("/")[0] for record in run.records("actor")} == set(MIXED)
        assert (run.output_dir / "verifier_0" / "stderr.log").exists()
    if case == "gymnasium_text":
        assert (run.output_dir / "environment_0" / "stderr.log").exists()
        metrics = [summary["metrics"] for group in run.records("actor") for summary in group["rollouts"]]
        assert metrics and all("turns" in each for each in metrics)
