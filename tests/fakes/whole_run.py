"""Whole runs for the end-to-end tests: a user's task in a folder of its own, started by the real launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fakes.limits import PROCESS_LIMIT_S

TASK_CODE = '''
import time

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult


def load_problems(dataset_names):
    return [{"dataset": name, "word": i} for name in dataset_names for i in range(32)]


async def generate_rollout(cfg, llm, problem, session):
    """The reward is 1 if the first sampled id is even: easy to learn from random weights, in any vocabulary."""
    started = time.time()
    messages = [{"role": "user", "content": f"Say something about {problem['word']}"}]
    call = await llm_async_generate(llm, Prompt(messages=messages), session)
    text = make_training_text(llm, call)
    text.reward = float(call.output_token_ids[0] % 2 == 0)
    metrics = BaseMetrics(reward=text.reward, success=bool(text.reward), no_error=True, no_answer=False)
    return RolloutResult(
        training_texts=[text], metrics=metrics, latency=time.time() - started, dataset_name=problem["dataset"]
    )
'''

TASK_CONFIG = """
defaults:
  - quickstart
  - _self_

dataset_loader: even_task.load_problems
dataset_loader_params: null
train_dataset_names: [train]
test_dataset_names: [test]
actor:
  rollout_policy: even_task.generate_rollout
  test_samples: 128
  llm_max_rollouts: 16
attempts: 4
max_lag: 64
llm:
  parameters:
    max_tokens: 16
test_llm:
  parameters:
    max_tokens: 16
finetune:
  train_batch_size: 1
  gradient_accumulation_passes: 64
  learning_rate: 0.002
  lr_scheduler_type: constant
  num_warmup_steps: 0
  max_train_steps: 8
vllm_config:
  vllm_kwargs:
    max-num-seqs: 16
"""


@dataclass(frozen=True)
class WholeRun:
    """A task folder and the run directory of the run to start."""

    task_dir: Path
    output_dir: Path
    model_path: Path

    def command(self, *overrides: str) -> list[str]:
        return [
            *(sys.executable, "-m", "pipelinerl.launch"),
            *("--config-dir", str(self.task_dir), "--config-name", "even_task"),
            *(f"output_dir={self.output_dir}", f"model_path={self.model_path}", "world.device=cpu", *overrides),
        ]

    def run(self, *overrides: str, timeout_s: float = 1200) -> subprocess.CompletedProcess[str]:
        """Run to the end, from a folder that is not the checkout."""
        return subprocess.run(
            self.command(*overrides),
            cwd=self.task_dir,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(
        self, *overrides: str, extra_env: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """`before`: words that run the launcher somewhere else."""
        return subprocess.Popen(
            [*before, *self.command(*overrides)],
            cwd=self.task_dir,
            env={**environment(), **(extra_env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output_dir / "summary.json").read_text())

    def records(self, topic: str) -> list[dict[str, Any]]:
        """All records of a topic, of every writer, as plain data. What is just being written is left out."""
        files = sorted((self.output_dir / "streams" / topic).glob("*/*/*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]

    def metric_rows(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`. What is just being written is left out."""
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().split("\n")[:-1]]

    def logs(self) -> str:
        """The end of every job's log, for the message of a failed assertion."""
        parts = []
        for file in sorted(self.output_dir.glob("*/stderr.log")):
            parts.append(f"--- {file.parent.name}\n{file.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)

    def steps(self, incarnation: int | None = None) -> list[int]:
        """Optimizer steps that are done, of one start or of all."""
        done = [record for record in self.records("trainer") if record.get("type") == "step_done"]
        return [record["step"] for record in done if incarnation in (None, record["incarnation"])]

    def wait(self, launcher: subprocess.Popen[str], what: str, found: Callable[[], Any]) -> Any:
        """What `found` returns once it is true; the launcher has to live so long."""
        end = time.monotonic() + PROCESS_LIMIT_S
        while not (result := found()):
            output = launcher.stdout.read() if launcher.poll() is not None and launcher.stdout else ""
            assert launcher.poll() is None, f"{what}: {output}\n{self.logs()}"
            assert time.monotonic() < end, f"{what}: not within {PROCESS_LIMIT_S} s\n{self.logs()}"
            time.sleep(0.2)
        return result

    def audit(self) -> dict[str, Any]:
        """What `audit` prints of a run in which everything adds up."""
        command = [sys.executable, "-m", "pipelinerl", "audit", str(self.output_dir), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == 0 and report["clean"], report["faults"]
        assert sum(report["fates"].values()) == report["submitted"]
        return report

    def process(self, job: str) -> psutil.Process:
        """The process of a job."""
        for process in self.living_processes():
            words = process.cmdline()
            if "--job" in words and words[words.index("--job") + 1] == job and "rollout_worker" not in " ".join(words):
                return process
        raise AssertionError(f"{job} is not running")

    def living_processes(self) -> list[psutil.Process]:
        """Processes of this run that still exist (they carry the run directory in their arguments)."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.output_dir) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def make_whole_run(folder: Path) -> WholeRun:
    """Write the task, its configuration and a random tiny model below `folder`."""
    from pipelinerl.tiny.build import build_tiny_model

    task_dir = folder / "task"
    task_dir.mkdir(parents=True)
    (task_dir / "even_task.py").write_text(textwrap.dedent(TASK_CODE))
    (task_dir / "even_task.yaml").write_text(TASK_CONFIG)
    model_path = build_tiny_model(folder / "model", seed=3, warmup=None, progress=lambda line: None)
    return WholeRun(task_dir, folder / "run", model_path)
