"""Fixtures for the trainer's tests: the kit, and whole trainers with a fake server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.finetune_kit import FakePublisher, FakeReader, FakeWriter, Kit, save_tokenizer, tiny_model
from fakes.static_pool import StaticPool

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.loop import Trainer
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.report import Reporter
from pipelinerl.records import TrainingBatch
from pipelinerl.role import RoleContext
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.recorder import MetricRecorder
from pipelinerl.world import Job, WorldMap


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def kit() -> Kit:
    return Kit()


def role_context(root: Path, model: Path, incarnation: int = 0, servers: int = 0, **settings: Any) -> RoleContext:
    """The context of a trainer with one rank on a CPU; `settings` are those of the run and of `finetune`."""
    finetune: dict[str, Any] = dict(
        seq_length=128, learning_rate=1e-2, num_warmup_steps=0, lr_scheduler_type="linear", max_train_steps=4
    )
    run = {key: settings.pop(key) for key in list(settings) if key not in FinetuneConfig.model_fields}
    # A stream has one writer, and a resumed trainer of a test meets that of the first one.
    finetune |= dict(gradient_checkpointing=False, record_token_ratios=False) | settings
    config = RunConfig(output_dir=str(root), model_path=str(model), finetune=finetune, **run)
    job = Job("finetune", "finetune_0", 0, 0, 0, "localhost", [], None, None, None, 1)
    others = [Job("actor_llm", f"actor_llm_{k}", k, k, 0, "localhost", [], 1, "http://x", 2, 1) for k in range(servers)]
    run_dir = RunDir(root)
    return RoleContext(
        config=config,
        world=WorldMap([job, *others], "cpu", 1, "127.0.0.1", 1234),
        job=job,
        run_dir=run_dir,
        run_id="run-a",
        incarnation=incarnation,
        token="",
        heartbeat=Heartbeat(run_dir.heartbeat_file("finetune_0"), 0.2),
        streams=StreamHub(config.streams, run_dir, "run-a"),
    )


class FakedTrainer(Trainer):
    """Reads `batches` from a list and keeps what it reports in `written` and `metrics`."""

    batches: Sequence[TrainingBatch] = ()
    publisher: FakePublisher

    def _open_batches(self, stack: ExitStack) -> Any:
        return FakeReader(self.batches, self.state.data_offset)

    def _open_reporter(self, stack: ExitStack) -> Reporter:
        self.written: list[Any] = []
        self.metrics: list[Any] = []
        log = FakeWriter(self.written)
        recorder = MetricRecorder(FakeWriter(self.metrics), "finetune_0")  # type: ignore[arg-type]
        return Reporter(log, log, recorder, self.context.incarnation, clock=lambda: 5.0)  # type: ignore[arg-type]

    @property
    def root(self) -> Path:
        return self.context.run_dir.finetune

    @property
    def policy(self) -> PolicyModel:
        return self.backend.policy

    def go(self) -> FakedTrainer:
        self.run()
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    if not folder.exists():
        tiny_model().save_pretrained(folder)
        save_tokenizer(folder)
    return folder


@pytest.fixture
def batches(kit: Kit) -> list[TrainingBatch]:
    return [kit.batch(kit.samples(12, seed=step), step=step) for step in range(1, 5)]


@pytest.fixture
def start(
    tmp_path: Path, model_folder: Path, batches: list[TrainingBatch], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FakedTrainer]]:
    """Makes trainers with one fake server; one with the folder of an earlier one resumes from it."""
    given = batches
    with ExitStack() as stack:

        def make(
            folder: str = "run",
            batches: Sequence[TrainingBatch] | None = None,
            publisher: FakePublisher | None = None,
            **settings: Any,
        ) -> FakedTrainer:
            publisher = publisher or FakePublisher()
            monkeypatch.setattr("pipelinerl.finetune.loop.open_pool", lambda *_: StaticPool(publisher))
            monkeypatch.setattr(FakedTrainer, "batches", given if batches is None else batches)
            context = role_context(tmp_path / folder, model_folder, servers=1, **settings)
            trainer = FakedTrainer(context, Ranks(), stack)
            trainer.publisher = publisher
            return trainer

        yield make


@pytest.fixture
def role(tmp_path: Path, model_folder: Path) -> Callable[..., RoleContext]:
    return lambda **settings: role_context(tmp_path / "run", model_folder, **settings)
