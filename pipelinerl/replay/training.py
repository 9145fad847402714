"""The trainer's part of a replay: recorded batches give the recorded weights again. One process, no servers.

Called by `replay.run` for every batch. On a CPU with the plain backend and one trainer rank the sums are taken in the
same order, so weights and optimizer state come out equal bit by bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.backends.tensor_files import read_tensors
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.reference import load_reference
from pipelinerl.finetune.report import StepTimes, step_metrics
from pipelinerl.finetune.step import StepRunner
from pipelinerl.llm.tokens import load_tokenizer
from pipelinerl.records import TrainingBatch
from pipelinerl.rl.coefficients import EntropyControl
from pipelinerl.run.open_run import StartedRun

_COMPARED_NUMBERS = ("finetune/loss", "finetune/grad_norm")
_STATE_FILES = ("model.safetensors", "optimizer.safetensors")


class TrainingReplay:
    """A trainer that starts from the initial model.

    Raises:
        ConfigError: the run's backend or number of ranks cannot be replayed in one process.
    """

    def __init__(self, run: StartedRun) -> None:
        config = run.config
        _refuse_what_differs(config, run.world.num_finetune_ranks)
        self._states = run.run_dir.finetune / "training_state"
        torch.set_num_threads(max(run.world.jobs_of("finetune")[0].cores, 1))
        torch.manual_seed(config.seed)
        ranks = Ranks()
        policy = load_policy(config, ranks.device)
        has_servers = bool(run.world.jobs_of("preprocessor_llm"))
        reference = load_reference(config, policy, ranks.device, has_servers)
        self._backend = PlainBackend(policy, config.finetune, ranks)
        tokenizer = load_tokenizer(config.model_path, trust_remote_code=config.finetune.trust_remote_code)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        schedule = schedule_of(config.finetune)
        self._steps = StepRunner(self._backend, config.finetune, ranks, schedule, pad_id, reference)
        self._entropy_control: EntropyControl | None = None

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Train on `batch` and return the numbers of the step."""
        result = self._steps.run(batch, self._entropy_control)
        self._entropy_control = result.entropy_control
        times = StepTimes(0.0, 0.0, result.seconds, 0.0, result.seconds)
        return step_metrics(batch, result.metrics, result.grad_norm, result.learning_rate, times)

    def number_difference(self, values: dict[str, float], recorded: dict[str, float]) -> str | None:
        """Which number of the step differs from the recorded one, if one does."""
        for name in _COMPARED_NUMBERS:
            if name in recorded and values.get(name) != recorded[name]:
                return f"{name} is {values.get(name)!r}, recorded {recorded[name]!r}"
        return None

    def has_state(self, step: int) -> bool:
        """Whether the run kept its training state behind `step`."""
        return all((self._states / str(step) / name).is_file() for name in _STATE_FILES)

    def state_difference(self, step: int) -> str | None:
        """Which tensor differs from the run's training state behind `step`, if one does."""
        with tempfile.TemporaryDirectory() as folder:
            self._backend.save(Path(folder))
            for name in _STATE_FILES:
                mine, theirs = read_tensors(Path(folder) / name), read_tensors(self._states / str(step) / name)
                if mine.keys() != theirs.keys():
                    return f"{name} has other tensors"
                for key, tensor in theirs.items():
                    if not torch.equal(mine[key], tensor):
                        return f"{name}: {key}"
        return None


def _refuse_what_differs(config: RunConfig, num_ranks: int) -> None:
    for key, is_set in (("use_deepspeed", config.use_deepspeed), ("use_fsdp", config.use_fsdp)):
        if is_set:
            raise ConfigError(
                key, True, "false: a replay trains with the plain backend", "This run cannot be replayed."
            )
    if num_ranks != 1:
        raise ConfigError(
            "world.num_finetune_ranks",
            num_ranks,
            "1: the sum over several ranks is taken in another order",
            "This run cannot be replayed.",
        )
