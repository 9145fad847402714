"""Each command of docs/from_pipelinerl.md trains two steps, with a small CPU, model and sizes instead of its own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.whole_run import environment

from pipelinerl.tiny.build import build_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "from_pipelinerl.md"
COMMANDS = [
    shlex.split(found)
    for found in re.findall(r"(?m)^python -m pipelinerl\.launch (.*)$", PAGE.read_text().replace("\\\n", " "))
]
#: What the command says about its machine.
HARDWARE = re.compile(r"backend\.config|world\.(num|actor|finetune)_.*|vllm_config\.vllm_kwargs\.tensor-parallel-size")
SMALL = [
    *("world=cpu", "backend=plain", "finetune.dtype=fp32", "finetune.max_train_steps=2", "actor.test_samples=4"),
    *("finetune.gradient_accumulation_passes=32", "llm.parameters.max_tokens=16", "actor.llm_max_rollouts=16"),
    *("vllm_config.vllm_kwargs.max_model_len=512", "vllm_config.vllm_kwargs.dtype=float32"),
    *("vllm_config.vllm_kwargs.block-size=32", 'vllm_config.vllm_kwargs.enforce-eager=""'),
]
# As such functions are shown, with its imports.
AGENT = """
from typing import Any, Dict, Tuple

import torch

turn = 0


async def step(state, action, label, **kwargs) -> Tuple[float, Dict[str, Any], bool]:
    global turn
    turn += 1
    reward = torch.rand(1) if turn == 3 else torch.tensor(0)
    return reward, state + action + " Not correct, try again: ", turn == 3, {}
"""


def test_there_are_six() -> None:
    assert len(COMMANDS) == 6


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words[:2]))
def test_the_command_trains(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "agent_func.py").write_text(AGENT)
    rows = [{"context_messages": [{"role": "user", "content": f"Say {number}"}]} for number in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = build_tiny_model(tmp_path / "model", seed=3, warmup=None, progress=lambda line: None)
    kept = [word for word in words if not HARDWARE.fullmatch(word.partition("=")[0])]
    command = [*kept, *SMALL, f"model_path={model}", f"output_dir={tmp_path / 'run'}"]
    if "agent" in words:
        command.append("agent.prompt_data=prompts.jsonl")
    for overrides in (["dry_run=true"], []):
        done = subprocess.run(
            [sys.executable, "-m", "pipelinerl.launch", *command, *overrides],
            **{"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 1200},
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 2)
