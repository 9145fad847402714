"""Training states on disk (`finetune/training_state/<step>/`): complete or absent, verified when read.

All ranks save and restore together; each writes its own shard.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.errors import UserError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.tensor_files import read_tensors, write_tensors
from pipelinerl.records import TrainingBatch
from pipelinerl.rl.loss import EntropyControl
from pipelinerl.rundir.durable import (
    PARTIAL_PREFIX,
    checksums,
    finish_folder,
    partial_folder,
    remove_folder,
    start_folder,
)

logger = logging.getLogger(__name__)

MANIFEST = "state.json"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """State after optimizer step `step`; step 0 is the initial model.

    `data_offset` is the next record of stream `training_data`; `actor_offset` is where stream `actor` had to be resumed
    when the last trained batch was made; `epochs_done` are passes over the problems. Weights, optimizer and offsets are
    saved as one unit. `is_over`: nothing is left to train; it is never saved.
    `entropy_control`: None before the first step, and without `finetune.rl.target_entropy`.
    """

    step: int = 0
    samples_processed: int = 0
    data_offset: int = 0
    actor_offset: int = 0
    epochs_done: float = 0.0
    is_over: bool = False
    incarnation: int = 0
    entropy_control: EntropyControl | None = None

    def after(
        self, batch: TrainingBatch, data_offset: int, entropy_control: EntropyControl | None = None
    ) -> TrainerState:
        """The state once `batch` was trained; `data_offset` is the offset after its record."""
        return TrainerState(
            step=batch.step,
            samples_processed=self.samples_processed + len(batch.samples),
            data_offset=data_offset,
            actor_offset=batch.actor_offset,
            epochs_done=max(self.epochs_done, batch.epochs_done),
            incarnation=self.incarnation,
            entropy_control=entropy_control,
        )

    def is_complete(self, config: FinetuneConfig, update_interval: int) -> bool:
        """Whether training ends here: with the last step, or when the passes over the problems are done.

        The latter counts where weights are sent, every `update_interval` steps, so that rounds are completed.
        """
        if self.step >= config.last_step or self.is_over:
            return True
        epochs_done = config.max_epochs is not None and self.epochs_done >= config.max_epochs
        return epochs_done and self.step % update_interval == 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `state.json`, written last: it vouches for all other files."""

    state: TrainerState
    world_size: int
    files: dict[str, tuple[int, int]]


class CheckpointStore:
    """Saves and restores training states below `root` (`finetune/training_state`).

    Args:
        keep_last: how many of the newest stay; None: all.
        keep_steps: steps whose states are never deleted.
    """

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        keep_last: int | None = None,
        keep_steps: frozenset[int] = frozenset(),
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._keep_last = keep_last
        self._keep_steps = keep_steps

    def save(self, state: TrainerState, backend: Backend) -> TrainerState | None:
        """Write the state of all ranks and publish it atomically.

        Returns:
            On rank 0 the previous state, if any: no resume goes further back.

        Raises:
            OSError: it cannot be written.
        """
        final, before = self._root / str(state.step), None
        if self._ranks.is_first:
            start_folder(final)
        self._ranks.barrier()
        partial = partial_folder(final)
        backend.save(partial)
        _write_rng(partial / _rng_name(self._ranks), self._ranks.device)
        self._ranks.barrier()
        if self._ranks.is_first:
            manifest = Manifest(state=state, world_size=self._ranks.world_size, files=checksums(partial))
            (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            finish_folder(final)
            self._prune()
            if len(steps := _steps(self._root)) > 1:
                before = decode_manifest(self._root / str(steps[1])).state
        self._ranks.barrier()
        return before

    def restore(self, backend: Backend) -> TrainerState | None:
        """Load the newest complete state into `backend`; None if there is none.

        Raises:
            UserError: states exist but none is complete.
        """
        found = newest_complete(self._root) if self._ranks.is_first else None
        step = self._ranks.broadcast(-1 if found is None else found.state.step)
        if step < 0:
            return None
        folder = self._root / str(step)
        manifest = found or decode_manifest(folder)
        backend.load(folder)
        rng = folder / _rng_name(self._ranks)
        # More ranks than before: new ones continue with the first one's random state.
        _read_rng(rng if rng.exists() else folder / _rng_name(Ranks()), self._ranks.device)
        logger.info("resumed from %s: step %d", folder, step)
        return manifest.state

    def _prune(self) -> None:
        """Remove old states and leftovers. What cannot be removed is left."""
        newest = _steps(self._root)
        old = [] if self._keep_last is None else newest[self._keep_last :]
        old = [step for step in old if step not in self._keep_steps]
        doomed = [self._root / str(step) for step in old]
        doomed += [path for path in self._root.iterdir() if path.name.startswith(PARTIAL_PREFIX)]
        for folder in doomed:
            remove_folder(folder)


def newest_complete(root: Path) -> Manifest | None:
    """Manifest of the newest training state whose files are intact; None if there are no states.

    Raises:
        UserError: all states are damaged.
    """
    faults = []
    for step in _steps(root):
        folder = root / str(step)
        try:
            return read_manifest(folder)
        except (OSError, ValueError) as error:
            logger.warning("training state %s is not used: %s", folder, error)
            faults.append(f"{folder}: {error}")
    if faults:
        raise UserError(
            f"no training state can be used ({'; '.join(faults)}). "
            "Restore one from a backup, or set force_restart=true to start over."
        )
    return None


def read_manifest(folder: Path) -> Manifest:
    """Manifest of `folder` after checking size and checksum of every file. ValueError says what is wrong."""
    manifest = decode_manifest(folder)
    found = checksums(folder)
    for name, expected in manifest.files.items():
        if found.get(name) != tuple(expected):
            raise ValueError(f"{name}: got (bytes, crc32) {found.get(name)}, expected {tuple(expected)}")
    return manifest


def decode_manifest(folder: Path) -> Manifest:
    """Manifest of `folder`, without checking its files."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise ValueError(f"{MANIFEST}: {error}") from error


def _steps(root: Path) -> list[int]:
    """Steps that have a folder, newest first."""
    if not root.is_dir():
        return []
    return sorted((int(path.name) for path in root.iterdir() if path.name.isdecimal()), reverse=True)


def _rng_name(ranks: Ranks) -> str:
    return f"rng_{ranks.rank}.safetensors"


def _write_rng(file: Path, device: torch.device) -> None:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    write_tensors(file, states)


def _read_rng(file: Path, device: torch.device) -> None:
    states = read_tensors(file)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
