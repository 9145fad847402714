"""A run directory with an actor in it, and a trainer for it that only counts: for tests of the actor as a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.load import save_config
from pipelinerl.config.run import RunConfig
from pipelinerl.records import (
    EvaluationResult,
    FateRecord,
    Group,
    MetricRecord,
    StepDone,
    TrainerMessage,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.role import TOKEN_KEY
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import Job, WorldMap

RUN_ID = "test-run"
_COMMAND = (sys.executable, "-m", "pipelinerl.actor.main")
TASK = """
import asyncio

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult


def load_problems(dataset_names, size=6):
    return [
        {"id": f"{name}-{i}", "dataset": name, "turns": 1 + i % 3, "words": f"w{10 + i} w4"}
        for name in dataset_names
        for i in range(size)
    ]


async def generate_rollout(cfg, llm, problem, session):
    calls = []
    for turn in range(problem["turns"]):
        content = problem["words"] + f" w{20 + turn}"
        calls.append(await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": content}]), session))
    texts = [make_training_text(llm, call) for call in calls]
    for text in texts:
        text.reward = 0.5
    metrics = BaseMetrics(reward=0.5, success=problem["turns"] == 1, no_error=True, no_answer=False)
    return RolloutResult(texts, metrics, latency=0.1, dataset_name=problem["dataset"])
"""


class ActorRun:
    """One actor process on a prepared run directory.

    Args:
        root: run directory.
        model: folder with a tokenizer.
        server_urls: of the servers.
        token: of the servers.
        task: source of the module `module` with `load_problems` and `generate_rollout`.
        overrides: keys of the configuration that differ from small defaults.
    """

    def __init__(
        self,
        root: Path,
        model: Path,
        server_urls: Sequence[str],
        token: str,
        task: str = TASK,
        module: str = "my_task",
        incarnation: int = 0,
        **overrides: Any,
    ) -> None:
        self.files = RunDir(root / "run")
        self.token = token
        self.task_dir = root / "task"
        self.task_dir.mkdir(parents=True, exist_ok=True)
        (self.task_dir / f"{module}.py").write_text(textwrap.dedent(task), encoding="utf-8")
        self.config = RunConfig.model_validate(_merge(_defaults(self.files.root, model), overrides))
        self.files.config_file.parent.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.files.config_file)
        write_identity(self.files.identity_file, RunIdentity(run_id=RUN_ID, incarnation=incarnation))
        jobs = [_job("actor_llm", index, url) for index, url in enumerate(server_urls)] + [_job("actor", 0, None)]
        world = WorldMap(jobs, "cpu", 1, "127.0.0.1", 1)
        self.files.world_file.write_text(world.to_json(), encoding="utf-8")
        self.hub = StreamHub(self.config.streams, self.files, RUN_ID)
        self.process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def started(self) -> Iterator[ActorRun]:
        """Run the actor while the context is open; it is killed with its workers at the end."""
        folder = self.files.job("actor_0")
        folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, TOKEN_KEY: self.token, "PYTHONPATH": str(self.task_dir), "OMP_NUM_THREADS": "1"}
        with (folder / "stderr.log").open("wb") as stderr:
            self.process = subprocess.Popen(
                [*_COMMAND, "--run-dir", str(self.files.root), "--job", "actor_0"],
                stderr=stderr,
                env=env,
                start_new_session=True,
            )
        try:
            yield self
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()

    def wait(self, timeout_s: float = 60) -> int:
        """Wait for the actor's end and return its exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    @property
    def stderr(self) -> str:
        return (self.files.job("actor_0") / "stderr.log").read_text(encoding="utf-8")

    def read(self, topic: str, record_type: Any, instance: str = "actor_0") -> list[Any]:
        """Return what is in a stream now."""
        reader = self.hub.reader(topic, instance, record_type)
        records = []
        while entries := reader.read(0.05):
            records.extend(entry.record for entry in entries)
        reader.close()
        return records

    @property
    def groups(self) -> list[Group]:
        return self.read("actor", Group)

    @property
    def fates(self) -> list[FateRecord]:
        return self.read("fates", FateRecord)

    @property
    def evaluations(self) -> list[EvaluationResult]:
        return self.read("evaluation", EvaluationResult)

    @property
    def metrics(self) -> list[MetricRecord]:
        return self.read("metrics", MetricRecord)


class CountingTrainer:
    """Reads groups and says that it trained on them: a step when `samples_per_step` samples are there.

    `on_version` is called before each weight update with its version (to tell a fake server). `largest_backlog` is the
    largest number of samples that had been published and not trained at the end of a step.
    """

    def __init__(self, run: ActorRun, steps: int, on_version: Any, step_s: float = 0.0) -> None:
        self._run = run
        self._steps = steps
        self._on_version = on_version
        self._step_s = step_s
        self._writer = run.hub.writer("trainer", "finetune_0", TrainerMessage)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self.batches: list[list[Group]] = []
        self.failure: BaseException | None = None

    def __enter__(self) -> CountingTrainer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(60)
        self._writer.close()
        if self.failure is not None:
            raise self.failure

    def _train(self) -> None:
        try:
            self._run_steps()
        except BaseException as error:  # noqa: BLE001 - raised again by the test's thread
            self.failure = error

    def _run_steps(self) -> None:
        reader = self._run.hub.reader("actor", "actor_0", Group)
        self._update(0)
        waiting: list[Group] = []
        processed = 0
        for step in range(1, self._steps + 1):
            batch: list[Group] = []
            while sum(len(group.samples) for group in batch) < self._run.config.finetune.samples_per_step:
                while not waiting:
                    if self._run.process is not None and self._run.process.poll() is not None:
                        return
                    waiting.extend(entry.record for entry in reader.read(1.0))
                batch.append(waiting.pop(0))
            time.sleep(self._step_s)
            self.batches.append(batch)
            processed += sum(len(group.samples) for group in batch)
            self._update(step)
            self._writer.write(
                StepDone(
                    step=step,
                    time=time.time(),
                    group_ids=[group.id for group in batch],
                    num_samples=sum(len(group.samples) for group in batch),
                    samples_processed=processed,
                )
            )
        self._writer.write(TrainingDone(version=self._steps, time=time.time(), samples_processed=processed))
        reader.close()

    def _update(self, version: int) -> None:
        self._on_version(version)
        self._writer.write(WeightUpdateSuccess(version=version, time=time.time(), seconds={}, num_servers=1))


def _defaults(output_dir: Path, model: Path) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "model_path": str(model),
        "attempts": 2,
        "max_lag": 0,
        "dataset_loader": "my_task.load_problems",
        "train_dataset_names": ["train"],
        "test_dataset_names": ["test"],
        "actor": {"rollout_policy": "my_task.generate_rollout", "llm_max_rollouts": 8},
        "finetune": {"train_batch_size": 1, "gradient_accumulation_passes": 8},
        "llm": {"parameters": {"max_tokens": 5}},
        "test_llm": {"parameters": {"max_tokens": 5}},
    }


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        own = merged.get(key)
        merged[key] = _merge(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return merged


def _job(kind: str, index: int, url: str | None) -> Job:
    return Job(kind, f"{kind}_{index}", index, 0, 0, "127.0.0.1", [], None, url, None, 1)
