"""Runs of the whole pipeline with parts of the algorithm that the default leaves out: adapters, KL, a value head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fakes.whole_run import WholeRun, make_whole_run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS = 4
FEW = ("actor.test_samples=8", "max_lag=32", "finetune.gradient_accumulation_passes=32")


def finished(folder: Path, *overrides: str) -> tuple[WholeRun, list[dict[str, Any]]]:
    """A completed run, and the trainer's numbers step by step."""
    run = make_whole_run(folder)
    result = run.run(*FEW, f"finetune.max_train_steps={STEPS}", *overrides, timeout_s=2300)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}\n{run.logs()}"
    assert run.summary["status"] == "completed" and run.summary["steps"] == STEPS
    assert run.summary["weight_updates"] == STEPS + 1
    # The probe of the updates: servers run what the trainer trains.
    assert run.summary["logprob_abs_diff_mean"] < 1e-4
    records = [record for record in run.records("metrics") if "finetune/loss" in record["values"]]
    steps = [record["values"] for record in sorted(records, key=lambda record: record["step"])]
    assert len(steps) == STEPS
    assert all(values["finetune/grad_norm"] > 0 for values in steps)
    assert run.living_processes() == []
    return run, steps


def assert_kl_starts_at_0_and_moves(steps: list[dict[str, Any]], at_start: float) -> None:
    found = [values["rl/kl_reference"] for values in steps]
    assert 0 <= found[0] <= at_start
    assert min(found[1:]) > 100 * max(at_start, 1e-9)


def test_m4_w1_t3_adapters_with_a_frozen_model_beside_the_trainer(tmp_path: Path) -> None:
    """LoRA with KL in loss and reward at temperature 0.6, the reference being the policy without its adapters."""
    run, steps = finished(
        tmp_path,
        "finetune.lora.enabled=true",
        "finetune.learning_rate=0.001",
        "finetune.rl.kl_coef=0.05",
        "finetune.rl.reward_minus_kl_coef=0.001",
        "llm.parameters.temperature=0.6",
        "test_llm.parameters.temperature=0.6",
    )
    assert_kl_starts_at_0_and_moves(steps, at_start=0.0)
    # The first step trains the policy that sampled its tokens.
    assert steps[0]["finetune/lag_max_versions"] == 0
    assert steps[0]["finetune/logprob_abs_diff_mean"] < 1e-4
    assert (run.output_dir / "finetune" / "current" / "adapter" / "adapter_model.safetensors").exists()


def test_w1_servers_that_hold_the_model_get_the_adapter_alone(tmp_path: Path) -> None:
    """KL from a server of the initial model, which has no adapter; updates bring a small part of the model's bytes."""
    run, steps = finished(
        tmp_path,
        "finetune.lora.enabled=true",
        "finetune.lora.sync=adapter",
        "finetune.lora.r=4",
        "finetune.lora.alpha=32",
        "finetune.learning_rate=0.001",
        "finetune.rl.kl_coef=0.05",
        "world.num_preprocessor_llms=1",
        "supervise.probe_every_n_updates=1",
    )
    assert_kl_starts_at_0_and_moves(steps, at_start=1e-8)
    on_policy = [v["rl/logprob_abs_diff_on_policy"] for v in steps if v.get("rl/on_policy_tokens")]
    assert on_policy and max(on_policy) < 1e-4
    folder = run.output_dir / "finetune" / "current"
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    rows = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["source"] == "weight_update"]
    assert {values["weight_update/sent_bytes"] for values in updates} == {sum(4 * t.numel() for t in adapter.values())}
    assert all(values["weight_update/logprob_abs_diff_mean"] < 1e-4 for values in updates)
    whole = sum(4 * tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert updates[0]["weight_update/sent_bytes"] < whole / 4


def test_m4_kl_from_reference_servers(tmp_path: Path) -> None:
    """The KL term of the loss and of the reward with log-probs of a server of the initial model."""
    run, steps = finished(
        tmp_path,
        "world.num_preprocessor_llms=1",
        "finetune.learning_rate=0.0002",
        "finetune.rl.kl_coef=0.05",
        "finetune.rl.reward_minus_kl_coef=0.001",
    )
    assert "preprocessor_llm_0" in {path.name for path in run.output_dir.iterdir()}
    # Server and trainer agree within rounding: k3 of a difference d is d^2 / 2.
    assert_kl_starts_at_0_and_moves(steps, at_start=1e-8)


def test_w1_a_value_head_is_trained_saved_and_never_sent(tmp_path: Path) -> None:
    run, steps = finished(
        tmp_path,
        "finetune.rl.policy_loss=ppo",
        "finetune.rl.advantage_estimator=gae",
        "finetune.rl.value_loss_coef=0.5",
        "finetune.learning_rate=0.0002",
        "finetune.rl.critic_learning_rate=0.0005",
    )
    # It starts at 0 and moves towards the rewards, which are 0 and 1.
    assert steps[0]["rl/value_mean"] == 0.0
    assert 0.02 < steps[-1]["rl/value_mean"] < 1
    current = run.output_dir / "finetune" / "current"
    head = load_file(current / "value_head" / "model.safetensors")
    assert head["weight"].abs().max() > 0 and head["bias"].abs().max() > 0
    assert not [name for name in load_file(current / "model.safetensors") if "value" in name]


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_a_run_from_an_adapter_serves_it_at_once_resumes_and_exports_the_trained_one(tmp_path: Path, sync: str) -> None:
    run = make_whole_run(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
    started = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for parameter in started.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.05)
    started.save_pretrained(tmp_path / "adapter")
    words = (*FEW, "finetune.lora.enabled=true", f"finetune.lora.sync={sync}", "supervise.probe_every_n_updates=1")
    for steps in (2, 3):
        path = f"finetune.lora.adapter_path={tmp_path / 'adapter'}"
        result = run.run(*words, path, f"finetune.max_train_steps={steps}", timeout_s=1100)
        assert result.returncode == 0, f"{result.stdout[-3000:]}\n{run.logs()}"
        assert (run.summary["steps"], run.summary["status"]) == (steps, "completed")
    updates = [row for row in run.metric_rows() if row["source"] == "weight_update"]
    # Version 0, two steps; what the second start resumed with, its step.
    assert [row["step"] for row in updates] == [0, 1, 2, 2, 3]
    assert all(row["weight_update/logprob_abs_diff_mean"] < 1e-4 for row in updates)
    folder = run.output_dir / "finetune" / "current"
    fresh = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
    trained = dict(peft.PeftModel.from_pretrained(fresh, folder / "adapter").merge_and_unload().named_parameters())
    first = dict(started.merge_and_unload().named_parameters())
    exported = load_file(folder / "model.safetensors")
    assert all(torch.allclose(tensor, trained[name], atol=1e-6, rtol=0) for name, tensor in exported.items())
    moved = max((tensor - first[name]).abs().max().item() for name, tensor in exported.items())
    assert 1e-4 < moved < 0.05
