"""Whole runs with servers on one GPU and ranks on another: a server is killed, and ranks change between two starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.whole_run import WholeRun, make_whole_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
CUDA = (
    "world.device=cuda",
    "vllm_config.vllm_kwargs.gpu-memory-utilization=0.2",
    "vllm_config.vllm_kwargs.kv-cache-memory-bytes=1073741824",
)
ZERO3 = ("backend=deepspeed", "backend.config=deepspeed_stage3_bf16")


def updates(run: WholeRun) -> list[dict[str, Any]]:
    rows = run.metric_rows() if (run.output_dir / "metrics.jsonl").exists() else []
    return [row for row in rows if "weight_update/num_servers" in row]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_server_comes_back_over_nccl(tmp_path: Path, servers: int) -> None:
    """The only one, for which the run waits, or one of two."""
    run = make_whole_run(tmp_path)
    plan = [f"world.actor_gpus={str([[0]] * servers).replace(' ', '')}", "world.finetune_gpus=[1]", "backend=plain"]
    launcher = run.start(*CUDA, *plan, "finetune.max_train_steps=100000")
    try:
        run.wait(launcher, "three updates", lambda: len(updates(run)) >= 3)
        victim = run.process("actor_llm_0")
        engines = [child for child in victim.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
        (engines or [victim])[0].kill()

        def back() -> bool:
            return any(r.get("event") == "up" and r["name"] == "actor_llm_0" for r in run.records("pool"))

        run.wait(launcher, "its new start", back)
        seen = len(updates(run))
        run.wait(launcher, "all servers", lambda: updates(run)[seen:][-1:] and _servers(run) == servers)
        seen = len(updates(run))
        run.wait(launcher, "three more updates", lambda: len(updates(run)) > seen + 3)
        launcher.terminate()
        launcher.communicate(timeout=200)
    finally:
        launcher.kill()
    assert run.summary["status"] == "interrupted"
    assert max(row.get("weight_update/logprob_abs_diff_mean", 0.0) for row in updates(run)) < 1e-3
    run.audit()


def _servers(run: WholeRun) -> int:
    return int(updates(run)[-1]["weight_update/num_servers"])


@pytest.mark.parametrize("backend", [("backend=fsdp",), ZERO3], ids=["fsdp", "zero3"])
def test_a_run_of_two_ranks_goes_on_with_one(tmp_path: Path, backend: tuple[str, ...]) -> None:
    run = make_whole_run(tmp_path)
    shared = (*CUDA, "world.actor_gpus=[[0]]", *backend, "finetune.save_checkpoint_steps=2")
    for ranks, steps in (("[0,1]", 4), ("[1]", 8)):
        result = run.run(*shared, f"world.finetune_gpus={ranks}", f"finetune.max_train_steps={steps}", timeout_s=800)
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.steps() == [*range(1, 9)]
    assert run.steps(incarnation=1) == [5, 6, 7, 8]
    run.audit()
