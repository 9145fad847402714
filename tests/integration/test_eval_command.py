"""The command `eval` on a model with a real server: interrupted, continued, refused; its results and its rollouts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.whole_run import WholeRun, environment, make_whole_run

from pipelinerl.actor.estimates import interval, pass_at

PROBLEMS, K = 32, 8


def start(run: WholeRun) -> subprocess.Popen[str]:
    words = [str(run.model_path), "--config-dir", str(run.task_dir), "--config-name", "even_task"]
    words += ["-k", str(K), "--output", str(run.output_dir), "world.device=cpu", "llm.parameters.temperature=0.5"]
    # Slow enough that it can be interrupted in the middle.
    words += ["actor.llm_max_rollouts=8", "test_llm.parameters.max_tokens=32"]
    return subprocess.Popen(
        [sys.executable, "-m", "pipelinerl", "eval", *words],
        cwd=run.task_dir,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_evaluation_goes_on_and_its_numbers_are_those_of_its_rollouts(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    process, end = start(run), time.monotonic() + 300
    while len(run.records("evaluation_rollouts")) < 20 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    before = run.records("evaluation_rollouts")
    assert 20 <= len(before) < PROBLEMS * K and run.living_processes() == []

    process = start(run)
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, f"{printed}\n{run.logs()}"
    rollouts = run.records("evaluation_rollouts")
    assert len(rollouts) == PROBLEMS * K and rollouts[: len(before)] == before
    assert {path.parent.name for path in run.output_dir.glob("*/command.sh")} == {"actor_llm_0", "actor_0"}
    report = json.loads((run.output_dir / "evaluation.json").read_text())
    assert report["model"] == str(run.model_path)
    (sampling,) = report["sampling"]
    assert (sampling["names"], sampling["parameters"]["temperature"]) == (["test"], 0.5)
    (result,) = report["results"]
    assert (result["num_problems"], result["attempts"], result["num_rollouts"]) == (PROBLEMS, K, PROBLEMS * K)
    solved = [0] * PROBLEMS
    for each in rollouts:
        solved[json.loads(each["problem"])["word"]] += each["summary"]["success"]
    expected = interval([count / K for count in solved], PROBLEMS * K)
    assert result["estimates"]["avg_at_8"] == pytest.approx(
        {"value": expected.value, "low": expected.low, "high": expected.high}
    )
    best = sum(pass_at(K, count, 4) for count in solved) / PROBLEMS
    assert result["estimates"]["pass_at_4"]["value"] == pytest.approx(best)
    assert result["output_tokens"] == pytest.approx(
        sum(each["summary"]["output_tokens"] for each in rollouts) / len(rollouts)
    )
    assert "avg@8" in printed and f"{expected.low:.3f}-{expected.high:.3f}" in printed
    assert f"of {PROBLEMS * K} rollouts" in printed  # how far it is

    words = [sys.executable, "-m", "pipelinerl", "samples", str(run.output_dir), "--json", "--first", "1000"]
    shown = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert len(shown.stdout.splitlines()) == PROBLEMS * K

    process = start(run)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "evaluation.json" in printed
