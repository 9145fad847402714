"""A whole run on a fake server: launcher, actor, preprocessor and trainer are real; the server scores with a model.

`ScoringServer` takes the weights like any server and answers with their log-probs, so the trainer's probe passes.
As a program (`scoring_run.py CONFIG_JSON URL GROUP_PORT TOKEN TASK_DIR`) this module is the launcher of such a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from fakes.actor_run import TASK
from fakes.fake_server import FakeServer
from fakes.ports import free_port
from fakes.random_model import model_logprobs, random_model

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.launch import supervise
from pipelinerl.run.processes import Event, signals_as_events
from pipelinerl.run.start import RunSession, build_command, enter
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job, WorldMap


class ScoringServer(FakeServer):
    """Answers the scripted ids with the log-probs of the weights that it was given last."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._policy = random_model()
        self._loaded = ""

    def _answer(self, body: dict[str, Any], ids: list[int], spans: list[dict[str, Any]]) -> dict[str, Any]:
        if self.tensors and self._loaded != self.version:
            self._policy.load_state_dict(self.tensors, strict=False)
            self._loaded = self.version
        prompt = list(body["token_ids"])
        scores = [0.0, *model_logprobs(self._policy, prompt + ids)]
        answer = super()._answer(body, ids, spans)
        choice = answer["choices"][0]
        if choice["logprobs"] is not None:
            for entry, score in zip(choice["logprobs"]["content"], scores[len(prompt) :], strict=True):
                entry["logprob"] = entry["top_logprobs"][0]["logprob"] = score
        if answer["prompt_logprobs"] is not None:
            # The fake's own entries are one and the same.
            answer["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": score, "rank": 1, "decoded_token": ""}}
                for token, score in zip(prompt[1:], scores[1 : len(prompt)], strict=True)
            ]
        self.requests.clear()  # a long run makes many
        self.calls.clear()
        return answer


def start_run(
    root: Path, model: Path, server: FakeServer, file_limit_bytes: int | None = None, **overrides: Any
) -> subprocess.Popen[str]:
    """Start the launcher of a run in `root` / run on `server`; returns when it has entered that directory, or ended.

    Its output is in `root` / launcher.log. With `file_limit_bytes` no file of the run can become larger, as on a full
    disk. `overrides` are sections and keys of the configuration; those under `finetune` are added to small defaults.
    """
    task_dir = root / "task"
    task_dir.mkdir(parents=True, exist_ok=True)
    (task_dir / "my_task.py").write_text(textwrap.dedent(TASK), encoding="utf-8")
    config = {
        "output_dir": str(root / "run"),
        "model_path": str(model),
        "attempts": 2,
        # Rounds bound the lag themselves.
        **({} if overrides.get("schedule") == "conventional" else {"max_lag": 8}),
        "dataset_loader": "my_task.load_problems",
        "train_dataset_names": ["train"],
        "test_dataset_names": ["test"],
        "actor": {"rollout_policy": "my_task.generate_rollout", "llm_max_rollouts": 8},
        "llm": {"parameters": {"max_tokens": 5}},
        "test_llm": {"parameters": {"max_tokens": 5}},
        "world": {"device": "cpu"},
        "wandb": {"mode": "disabled"},
        **overrides,
        "finetune": {
            "train_batch_size": 1,
            "gradient_accumulation_passes": 8,
            "seq_length": 64,
            **overrides.get("finetune", {}),
        },
    }
    command = [sys.executable, __file__, json.dumps(config), server.url, str(free_port()), server.token, str(task_dir)]
    tests = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "OMP_NUM_THREADS": "1"}

    def limit_files() -> None:
        if file_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))

    with (root / "launcher.log").open("w") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, env=env, start_new_session=True, preexec_fn=limit_files
        )
    entered, deadline = RunDir(root / "run").world_file, time.monotonic() + 300
    while not entered.exists() and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return launcher


def end_run(launcher: subprocess.Popen[str], timeout_s: float) -> int:
    """Wait for the end of the run and return its exit code. What is left then is killed."""
    try:
        return launcher.wait(timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def logs_of(root: Path) -> str:
    """The ends of all logs, for messages."""
    files = [root / "launcher.log", *sorted((root / "run").glob("*/stderr.log"))]
    return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-2000:]}" for file in files if file.exists())


def wait_for_step(root: Path, launcher: subprocess.Popen[str], step: int, timeout_s: float = 600) -> None:
    """Return when the launcher has shown numbers of step `step`."""
    file, deadline = root / "run" / "metrics.jsonl", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        rows = file.read_text().split("\n")[:-1] if file.exists() else []
        if any('"source":"finetune_0"' in row and json.loads(row)["step"] >= step for row in rows):
            return
        assert launcher.poll() is None, logs_of(root)
        time.sleep(0.2)
    raise AssertionError(f"no step {step} within {timeout_s} s\n{logs_of(root)}")


def _job(kind: str, url: str | None = None, group_port: int | None = None) -> Job:
    return Job(kind, f"{kind}_0", 0, 0, 0, "127.0.0.1", [], None, url, group_port, 1)


def main(config_json: str, url: str, group_port: str, token: str, task_dir: str) -> int:
    """The launcher."""
    torch.set_num_threads(1)
    config = RunConfig.model_validate(json.loads(config_json))
    jobs = [_job("actor_llm", url, int(group_port)), _job("actor"), _job("preprocessor"), _job("finetune")]
    world = WorldMap(jobs, "cpu", 1, "127.0.0.1", 29500)
    events: SimpleQueue[Event] = SimpleQueue()
    with signals_as_events(events), enter(config) as entered:
        logging.basicConfig(level=logging.INFO, filename=entered.run_dir.launch_log)
        save_config(config, entered.run_dir.config_file)
        entered.run_dir.world_file.write_text(world.to_json(), encoding="utf-8")
        files = RunDir(entered.run_dir.root)
        commands = [build_command(job, world, files, os.environ, [Path(task_dir)]) for job in jobs[1:]]
        session = RunSession(config, world, files, entered.identity, commands, os.environ, token, events)
        return supervise(session).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
