"""scripts/compare_losses.py: two runs, two files, a first and a largest difference, and what cannot be compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_losses.py"


def compare(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def write(path, losses, norms=None, first_step=1):
    """A metrics file as a run writes it: the trainer's lines between those of others."""
    lines = [{"time": 0.0, "step": 0, "source": "actor_0", "actor/reward_mean": 0.5}]
    for step, loss in enumerate(losses, start=first_step):
        norm = norms[step - first_step] if norms else 1.0
        row = {"time": 1.0, "step": step, "source": "finetune_0", "finetune/loss": loss, "finetune/grad_norm": norm}
        lines += [row, {"time": 1.0, "step": step, "source": "preprocessor_0", "preprocessor/queue_batches": 1.0}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_two_equal_runs(tmp_path):
    for name in "ab":
        write(tmp_path / name / "metrics.jsonl", [0.1, 0.2, 0.3])
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.returncode == 0
    assert result.stdout == "equal at all 3 steps (tolerance 0); largest difference 0\n"


def test_the_first_and_the_largest_difference(tmp_path):
    # Step 2 differs by 0.01 in the loss (numbers below 1: absolute), step 3 by 2 / 10 in the norm (relative).
    a = write(tmp_path / "a.jsonl", [0.1, 0.20, 0.3, 0.4], [1.0, 1.0, 8.0, 1.0])
    b = write(tmp_path / "b.jsonl", [0.1, 0.21, 0.3, 0.4], [1.0, 1.0, 10.0, 1.0])
    result = compare(a, b)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "differ at 2 of 4 steps (tolerance 0)"
    assert lines[1] == "first:   step 2, finetune/loss: 0.2 and 0.21, difference 0.01"
    assert lines[2] == "largest: step 3, finetune/grad_norm: 8.0 and 10.0, difference 0.2"
    # Beyond 0.1 there is only step 3; with 0.3 nothing.
    assert "first:   step 3" in compare(a, b, "--tolerance", 0.1).stdout
    assert compare(a, b, "--tolerance", 0.3).returncode == 0
    # The loss alone.
    assert compare(a, b, "--tolerance", 0.1, "--metric", "finetune/loss").returncode == 0


def test_of_a_step_taken_twice_the_newest_counts(tmp_path):
    a = write(tmp_path / "a.jsonl", [0.1, 0.2])
    b = write(tmp_path / "b.jsonl", [0.1, 0.9])
    b.write_text(b.read_text() + json.dumps({"step": 2, "finetune/loss": 0.2, "finetune/grad_norm": 1.0}) + "\n")
    assert compare(a, b).returncode == 0


def test_a_step_or_a_number_that_is_not_there_is_a_difference(tmp_path):
    a, b = write(tmp_path / "a.jsonl", [0.1, 0.2]), write(tmp_path / "b.jsonl", [0.1])
    result = compare(a, b, "--tolerance", 1e9)
    assert result.returncode == 1
    assert "first:   step 2, finetune/loss: 0.2 and None, difference inf" in result.stdout
    c = tmp_path / "c.jsonl"
    c.write_text(json.dumps({"step": 1, "finetune/loss": 0.1}) + "\n")
    assert "step 1, finetune/grad_norm: 1.0 and None" in compare(b, c).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "actor/reward_mean": 1.0}\n', "no step has finetune/loss"),
        ('{"step": 1, "finetune/loss": 1.0}\nnot json\n', "line 2: expected an object"),
        ("[1]\n", "line 1: expected an object"),
    ],
)
def test_what_is_no_curve_is_said(tmp_path, text, message):
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    result = compare(file, file)
    assert result.returncode == 2 and message in result.stderr
    assert compare(tmp_path / "missing", file).returncode == 2
