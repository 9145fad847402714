"""The command `replay`: train a run again from its recorded streams, without servers, and compare.

Which groups form a batch depends on when they arrived, so that is read from the record; filters, advantages and the
packing plan are recomputed, each with the configuration of the start that made it. On a CPU with the plain backend and
one trainer rank, weights and optimizer state are reproduced bit for bit. Nothing is written into the run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from pipelinerl.commands import typed
from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy, load_reference
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.report import StepTimes, step_metrics
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import STATE, read_tensors
from pipelinerl.llm.tokens import load_tokenizer
from pipelinerl.preprocess.batcher import GroupScorer, ResumePoint
from pipelinerl.records import Group, MetricRecord, Sample, TrainerMessage, TrainingBatch
from pipelinerl.records.lineage import Lineage
from pipelinerl.rl.loss import EntropyControl
from pipelinerl.rl.packing import plan_step
from pipelinerl.streams.base import (
    ACTOR,
    ACTOR_TOPIC,
    METRICS_TOPIC,
    PREPROCESSOR,
    TRAINER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
    Entry,
)
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import StartedRun, find_run, open_streams
from pipelinerl.streams.read import read_all


def read_lineage(streams: StreamHub) -> Lineage:
    """Which start of the run did which step."""
    lineage = Lineage()
    for message in read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage):
        lineage.add(message)
    return lineage


class BatchReplay:
    """Rebuilds batches in order. `groups` are read as far as needed and dropped once used."""

    def __init__(self, groups: Iterator[Group]) -> None:
        self._groups = groups
        self._read: dict[str, Group] = {}

    def difference(self, batch: TrainingBatch, config: FinetuneConfig) -> str | None:
        """How the batch, rebuilt with `config`, differs from the recorded one; None if it does not."""
        recorded = {sample.id: sample for sample in batch.samples}
        rebuilt: list[Sample] = []
        for group_id in batch.group_ids:
            group = self._find(group_id)
            if group is None:
                return f"group {group_id} is not in the stream actor"
            rebuilt += [sample for sample in _score(group, recorded, config) if sample.id in recorded]
        if [sample.id for sample in rebuilt] != list(recorded):
            return "other samples"
        for mine, theirs in zip(rebuilt, batch.samples, strict=True):
            if mine != theirs:
                same_sample = replace(mine, advantage=theirs.advantage) == theirs
                return f"{'advantage' if same_sample else 'sample'} of {theirs.id}"
        plan = plan_step(rebuilt, len(batch.plan), config)
        return None if plan == batch.plan else "plan"

    def _find(self, group_id: str) -> Group | None:
        while group_id not in self._read:
            group = next(self._groups, None)
            if group is None:
                return None
            self._read[group.id] = group
        return self._read.pop(group_id)


def _score(group: Group, recorded: dict[str, Sample], config: FinetuneConfig) -> list[Sample]:
    # The preprocessor added the log-probs of the reference model.
    samples = [
        replace(sample, ref_logprobs=recorded[sample.id].ref_logprobs) if sample.id in recorded else sample
        for sample in group.samples
    ]
    scorer = GroupScorer(config, ResumePoint())
    ((scored, _),) = scorer.score([Entry(0, replace(group, samples=samples))])
    return scored.record.samples


_COMPARED_NUMBERS = ("finetune/loss", "finetune/grad_norm")


class TrainingReplay:
    """A trainer that starts from the initial model.

    Raises:
        ConfigError: the run's backend or number of ranks cannot be replayed in one process.
    """

    def __init__(self, run: StartedRun) -> None:
        config = run.config_of(0)
        for key, got, expected in (
            ("backend.type", config.backend.type, "plain"),
            ("world.num_finetune_ranks", run.world.num_finetune_ranks, 1),  # several ranks sum in another order
        ):
            if got != expected:
                raise ConfigError(key, got, str(expected), "This run cannot be replayed.")
        self._run, self._incarnation = run, 0
        self._states = run.run_dir.finetune / "training_state"
        torch.set_num_threads(max(run.world.jobs_of("finetune")[0].cores, 1))
        torch.manual_seed(config.seed)
        self._entropy_control: EntropyControl | None = None
        self._start(config)

    def _start(self, config: RunConfig) -> None:
        run, ranks = self._run, Ranks()
        policy = load_policy(config, ranks.device)
        has_servers = bool(run.world.jobs_of("preprocessor_llm"))
        reference = load_reference(config, policy, ranks.device, has_servers)
        self._backend = PlainBackend(policy, config.finetune, ranks)
        tokenizer = load_tokenizer(config.model_path, trust_remote_code=config.finetune.trust_remote_code)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._steps = StepRunner(self._backend, config.finetune, ranks, pad_id, reference)

    def resume(self, incarnation: int) -> None:
        """Continue with the configuration of start `incarnation` of the run."""
        config = self._run.config_of(incarnation)
        if config != self._run.config_of(self._incarnation):
            random_state = torch.get_rng_state()
            with tempfile.TemporaryDirectory() as folder:
                self._backend.save(Path(folder))
                self._start(config)
                self._backend.load(Path(folder))
            torch.set_rng_state(random_state)
        self._incarnation = incarnation

    def step(self, batch: TrainingBatch, incarnation: int = 0) -> dict[str, float]:
        """Train on `batch` as start `incarnation` of the run did, and return the numbers of the step."""
        if incarnation != self._incarnation:
            self.resume(incarnation)
        result = self._steps.run(batch, self._entropy_control)
        self._entropy_control = result.entropy_control
        times = StepTimes(0.0, 0.0, result.seconds, 0.0, result.seconds)
        return step_metrics(batch, result.metrics, result.grad_norm, result.learning_rate, times)

    def has_state(self, step: int) -> bool:
        """Whether the run kept its training state after `step`."""
        return (self._states / str(step) / STATE).is_dir()

    def state_difference(self, step: int) -> str | None:
        """Name of a tensor that differs from the run's training state after `step`; None if none does."""
        with tempfile.TemporaryDirectory() as folder:
            self._backend.save(Path(folder))
            mine, theirs = read_tensors(Path(folder) / STATE), read_tensors(self._states / str(step) / STATE)
        if different := sorted(mine.keys() ^ theirs.keys()):
            return f"only one has {different[0]}"
        return next((name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)), None)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """`first_difference` names the step and what differs; None if everything is equal."""

    steps: int
    checked_states: list[int]
    first_difference: str | None


def replay_run(
    run: StartedRun, max_steps: int | None = None, on_step: Callable[[int, dict[str, float]], None] | None = None
) -> ReplayReport:
    """Replay up to step `max_steps` (None: all) and stop at the first difference.

    Args:
        on_step: called with every step and its numbers.

    Raises:
        ConfigError: the run cannot be replayed.
        StreamError: a stream cannot be read.
    """
    trainer = TrainingReplay(run)
    checked: list[int] = []
    step, found = 0, None
    with open_streams(run) as streams:
        lineage = read_lineage(streams)
        end = lineage.last_step if max_steps is None else min(max_steps, lineage.last_step)
        # The newest numbers of repeated steps.
        numbers = {record.step: record.values for record in read_all(streams, METRICS_TOPIC, TRAINER, MetricRecord)}
        rebuild = BatchReplay(read_all(streams, ACTOR_TOPIC, ACTOR, Group))
        for batch in read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, TrainingBatch):
            if batch.step > end:
                break
            step = batch.step
            if difference := rebuild.difference(batch, run.config_of(batch.incarnation).finetune):
                found = f"batch of step {step}: {difference}"
                break
            values = trainer.step(batch, lineage.incarnation_of(step))
            if on_step is not None:
                on_step(step, values)
            recorded = numbers.get(step, {})
            different = [name for name in _COMPARED_NUMBERS if name in recorded and values.get(name) != recorded[name]]
            if different:
                name = different[0]
                found = f"step {step}: {name} is {values.get(name)!r}, recorded {recorded[name]!r}"
                break
            if trainer.has_state(step):
                checked.append(step)
                if difference := trainer.state_difference(step):
                    found = f"step {step}: {difference}"
                    break
    return ReplayReport(steps=step, checked_states=checked, first_difference=found)


def main(argv: list[str]) -> int:
    """Replay the run that `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=typed("replay"),
        description="Rebuild every batch of a run from its recorded groups and train on them again, without servers. "
        "On a CPU with the plain backend and one trainer rank the training states are reproduced bit for bit.",
        epilog="Exit code 2: this run cannot be replayed.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument("--verify", action="store_true", help="exit with 1 if a step differs from the record")
    parser.add_argument("--steps", type=int, help="stop after this step")
    args = parser.parse_args(argv)

    def show(step: int, values: dict[str, float]) -> None:
        loss, norm = values.get("finetune/loss", float("nan")), values["finetune/grad_norm"]
        print(f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}", flush=True)

    report = replay_run(find_run(args.run_dir), args.steps, show)
    states = ", ".join(map(str, report.checked_states)) or "none was kept"
    if report.first_difference is None:
        print(f"{report.steps} steps are equal to the record; training states compared bit for bit: {states}")
        return 0
    print(f"first difference: {report.first_difference} (training states compared: {states})")
    return EXIT_RUN_FAILED if args.verify else 0
