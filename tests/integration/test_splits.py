"""Several servers and several trainer ranks, as on hosts with many GPUs: each split is a whole run of a few steps.

Without GPUs the same processes meet over gloo, and lists of GPUs only say how many there are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.limits import PROCESS_LIMIT_S
from fakes.whole_run import WholeRun, environment, make_whole_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4
RUN_LIMIT_S = 850
COMMON = (
    f"finetune.max_train_steps={STEPS}",
    "finetune.gradient_accumulation_passes=16",
    "actor.test_samples=8",
    "max_lag=32",
    "wandb.mode=disabled",
)
ZERO3 = ("backend=deepspeed", "backend.config=deepspeed_stage3_fp32")
FSDP = ("backend=fsdp",)
MOVING = ("finetune.learning_rate=0.01", "max_lag=0")
PARALLEL = "vllm_config.vllm_kwargs.tensor-parallel-size=2"
TURNS = ("world.placement=colocated", "schedule=conventional", "steps_per_generation=1", "max_lag=null")


def lists(servers: str, ranks: str, *others: str) -> tuple[str, ...]:
    return (f"world.actor_gpus={servers}", f"world.finetune_gpus={ranks}", *others)


REFERENCE = "1 server, 1 reference server, 2 ranks"
# name: (overrides, servers, ranks)
SPLITS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "2 servers, 2 ranks, ZeRO-3": (lists("[[0],[1]]", "[2,3]", *ZERO3), 2, 2),
    "2 servers, 2 ranks, FSDP2": (lists("[[0],[1]]", "[2,3]", *FSDP), 2, 2),
    "3 servers, 1 rank": (("world.num_actor_llms=3",), 3, 1),
    "1 parallel server, 2 ranks": (lists("[[0,1]]", "[2,3]", PARALLEL, *ZERO3), 1, 2),
    REFERENCE: (
        lists("[[0]]", "[2,3]", "world.preprocessor_gpus=[[1]]", "finetune.rl.kl_coef=0.01", *MOVING, *ZERO3),
        1,
        2,
    ),
    "1 parallel server beside 2 ranks, in turns": (lists("[[0,1]]", "[0,1]", PARALLEL, *TURNS, *ZERO3), 1, 2),
    "2 servers beside 2 ranks, in turns, FSDP2": (lists("[[0],[1]]", "[0,1]", *TURNS, *FSDP), 2, 2),
}


def audit(run: WholeRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "pipelinerl", "audit", str(run.output_dir), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_trains_updates_every_server_and_ends(tmp_path: Path, name: str) -> None:
    overrides, servers, ranks = SPLITS[name]
    run = make_whole_run(tmp_path)
    result = run.run(*COMMON, *overrides, timeout_s=RUN_LIMIT_S)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.living_processes() == []
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["weight_updates"]) == ("completed", STEPS, STEPS + 1)
    assert len(list(run.output_dir.glob("actor_llm_*"))) == servers
    assert len(list(run.output_dir.glob("finetune_*"))) == ranks
    delivered = [record for record in run.records("trainer") if record["type"] == "weight_update_success"]
    assert {record["num_servers"] for record in delivered} == {servers}
    assert [record["version"] for record in delivered] == list(range(STEPS + 1))
    # Every server was asked about the same tokens as the trainer, over all of its workers.
    probes = [record["probe_abs_diff"] for record in delivered if record["probe_abs_diff"] is not None]
    assert len(probes) >= 2 and max(probes) < 1e-3
    report = audit(run)
    assert report["clean"] and report["fates"]["trained"] == summary["samples_trained"] >= STEPS * 16
    spans = {len(sample["version_spans"]) for b in run.records("training_data") for sample in b["samples"]}
    if "world.placement=colocated" in overrides:
        assert spans == {1}
    if name == REFERENCE:
        # The KL term is 0 before the first step, and moves with the policy afterwards.
        kl = [row["rl/kl_reference"] for row in run.metric_rows() if "rl/kl_reference" in row]
        assert len(kl) == STEPS and abs(kl[0]) < 1e-5 and kl[-1] > 1e-4


@pytest.mark.parametrize("split", ["ranks", "servers"])
def test_a_split_that_cannot_be_says_why(tmp_path: Path, split: str) -> None:
    run = make_whole_run(tmp_path)
    words, expected = {
        "ranks": (lists("[[0]]", "[1,1]"), "NCCL refuses two ranks on one"),
        "servers": (("vllm_config.vllm_kwargs.pipeline-parallel-size=2",), "Use tensor-parallel-size, or more servers"),
    }[split]
    result = run.run(*words, timeout_s=PROCESS_LIMIT_S)
    assert result.returncode == 2
    assert expected in result.stderr and "Traceback" not in result.stderr
