"""Kill, preempt, resume and continue a whole run with the real parts: nothing lost, nothing twice (D1, D7, D8, L7)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fakes.limits import PROCESS_LIMIT_S
from fakes.whole_run import WholeRun, make_whole_run

SAVE = "finetune.save_checkpoint_steps=2"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_d1_d7_a_run_is_killed_preempted_resumed_and_continued(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)

    launcher = run.start("finetune.max_train_steps=1000", SAVE)
    run.wait(launcher, "step 3", lambda: 3 in run.steps(0))
    run.process("finetune_0").kill()
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 1 and "finetune_0" in output
    killed = run.audit()
    assert killed["starts"] == 1 and killed["fates"]["pending"] > 0

    launcher = run.start("finetune.max_train_steps=1000", SAVE)
    run.wait(launcher, "step 5", lambda: max(run.steps(1), default=0) >= 5)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 143, output
    assert run.summary["status"] == "interrupted" and run.living_processes() == []
    last_step = max(run.steps())
    states = run.output_dir / "finetune" / "training_state"
    assert max(int(folder.name) for folder in states.iterdir()) == last_step, "SIGTERM saves the present step"
    run.audit()

    steps = last_step + 2
    finished = run.run(f"finetune.max_train_steps={steps}", SAVE, timeout_s=PROCESS_LIMIT_S)
    assert finished.returncode == 0, f"{finished.stderr}\n{run.logs()}"
    assert (run.summary["status"], run.summary["steps"]) == ("completed", steps)
    report = run.audit()
    assert (report["starts"], report["steps"]) == (3, steps)
    assert report["fates"]["trained"] == run.summary["samples_trained"]

    more = f"finetune.max_train_steps={steps + 2}"
    refused = run.run(more, SAVE, "seed=7", timeout_s=PROCESS_LIMIT_S)
    assert refused.returncode == 2 and "seed: got 7, expected" in refused.stderr
    # Keys of the scorer, of the loss and of the optimizer may change; `replay` then has to change them, too.
    other = ["finetune.learning_rate=3e-4", "finetune.rl.clamp=4", "finetune.rl.normalize_reward=true"]
    longer = run.run(more, SAVE, *other, timeout_s=PROCESS_LIMIT_S)
    assert longer.returncode == 0, f"{longer.stderr}\n{run.logs()}"
    assert f"changed since the last start: finetune.max_train_steps: {steps} -> {steps + 2}" in longer.stderr
    assert run.summary["steps"] == steps + 2 and run.audit()["starts"] == 4
    _check_streams(run, [0, last_step, steps], steps)
    replay = [sys.executable, "-m", "pipelinerl", "replay", str(run.output_dir), "--verify"]
    replayed = subprocess.run(replay, capture_output=True, text=True, timeout=300, check=False)
    assert replayed.returncode == 0 and "equal to the record" in replayed.stdout, replayed.stdout + replayed.stderr


def _check_streams(run: WholeRun, starts: list[int], steps: int) -> None:
    """What the audit proves, once more from the raw records, and what goes on across restarts."""
    started = [r["step"] for r in run.records("trainer") if r["type"] == "trainer_started"]
    assert [started[0], *started[2:]] == starts and started[1] >= 2 and started[1] % 2 == 0
    batches = run.records("training_data")
    assert [batch["step"] for batch in batches] == list(range(1, len(batches) + 1))
    ids = Counter(sample["id"] for batch in batches for sample in batch["samples"])
    assert set(ids.values()) == {1}
    numbers = Counter(int(group["id"].partition("-")[2]) for group in run.records("actor"))
    assert set(numbers.values()) == {1}, "every place in the order of problems is run once"
    evaluations = [(e["due_version"], e["is_final"]) for e in run.records("evaluation")]
    assert evaluations == [(0, False), (steps, True), (steps + 2, True)]
    for batch in batches:
        for sample in batch["samples"]:
            newest = max(span[0] for span in sample["version_spans"])
            oldest = min(span[0] for span in sample["version_spans"])
            assert newest < batch["step"]
            assert batch["step"] - 1 - oldest <= 3, "max_lag is one batch: ceil(64 / 64) + 1, and 1 for the rollout"
