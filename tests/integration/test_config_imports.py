"""The light modules stay light: no torch, and an answer at once."""

from __future__ import annotations

import subprocess
import sys
import time

HEAVY = ("torch", "vllm", "transformers", "accelerate", "deepspeed", "wandb", "matplotlib", "tensorboard")
LIGHT = (
    *(
        "pipelinerl.launch",
        "pipelinerl.world",
        "pipelinerl.config",
        "pipelinerl.config.compose",
        "pipelinerl.config.validate",
    ),
    *("pipelinerl.records", "pipelinerl.records.codec", "pipelinerl.errors", "pipelinerl.__main__"),
    *("pipelinerl.streams.base", "pipelinerl.role", "pipelinerl.run.start"),
    *("pipelinerl.actor.main", "pipelinerl.preprocess.main", "pipelinerl.run.node_agent"),
)
# Measured: well under one second, which is less than twenty starts of an interpreter. The bound leaves room for a busy
# machine, and on a very busy one it is so many of what a start takes there.
ANSWER_S, ANSWER_STARTS = 20.0, 50


def run(*argv: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, check=False)
    return done, time.monotonic() - started


def answer_limit_s() -> float:
    _, start_s = run("-c", "pass")
    return max(ANSWER_S, ANSWER_STARTS * start_s)


def test_light_modules_do_not_load_heavy_ones() -> None:
    code = (
        f"import sys, importlib\nfor module in {LIGHT}:\n    importlib.import_module(module)\n"
        f"    print(*(f'{{module}} loads {{name}}' for name in {HEAVY} if name in sys.modules))"
    )
    done, _ = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_composing_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pipelinerl.config.compose import compose; compose(['output_dir=x']); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done, _ = run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_of_launch_answers_at_once() -> None:
    done, seconds = run("-m", "pipelinerl.launch", "--help")
    assert done.returncode == 0 and "output_dir=DIR" in done.stdout
    assert seconds < answer_limit_s()


def test_launch_without_output_dir_answers_at_once() -> None:
    done, seconds = run("-m", "pipelinerl.launch")
    assert done.returncode == 2
    assert "output_dir" in done.stderr and "Traceback" not in done.stderr
    assert seconds < answer_limit_s()


def test_the_command_table() -> None:
    done, seconds = run("-m", "pipelinerl", "--help")
    assert done.returncode == 0 and "launch" in done.stdout and "tiny-model" in done.stdout
    assert seconds < answer_limit_s()


def test_an_unknown_command_names_the_nearest() -> None:
    done, _ = run("-m", "pipelinerl", "tiny-modle")
    assert done.returncode == 2
    assert done.stderr.startswith("command: got 'tiny-modle'") and "Did you mean 'tiny-model'?" in done.stderr


def test_no_command_shows_the_usage() -> None:
    done, _ = run("-m", "pipelinerl")
    assert done.returncode == 2 and "usage:" in done.stdout
