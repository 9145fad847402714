"""Exports versions that are evaluated, so that the best one can be kept. Every rank's loop calls it at the same steps.

When an evaluation falls due at the version that the servers just got, that version is exported: an evaluation takes
longer than a step, and its result comes when the weights are gone. All ranks take part in an export (a sharded model is
gathered); rank 0 writes, reads results, and keeps or removes what was exported. A disk that takes no more is a warning.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.finetune.best_model import KEY, NOTE, BestModel, EvaluatedVersion, note_text, write_note
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import EvaluationResult
from pipelinerl.rundir.durable import finish_folder, partial_folder, remove_folder, start_folder
from pipelinerl.streams.base import StreamReader
from pipelinerl.weights.source import WeightSource

logger = logging.getLogger(__name__)


@dataclass
class BestKeeper:
    """State of one start of the trainer.

    Args:
        ranks: of the trainer.
        schedule: that of the actor.
        exporter: writes the model.
        best: the folders; used on rank 0 alone.
        results: what the actor writes about evaluations, from the first one on; None on other ranks.
        incarnation: of the run.
        clock: seconds that only grow.
    """

    ranks: Ranks
    schedule: EvaluationSchedule
    exporter: ModelExporter
    best: BestModel
    results: StreamReader[EvaluationResult] | None
    incarnation: int
    clock: Callable[[], float] = time.perf_counter
    _due: int | None = field(default=None, init=False)
    _unfolded: list[EvaluationResult] = field(default_factory=list, init=False)

    def begin(self, version: int) -> None:
        """Settle what earlier starts left behind. Before `version` reaches the servers, as the actor evaluates then.

        As the actor does: without any evaluation so far, one is made of the first version.
        """
        made = -1
        if self.ranks.is_first:
            made = self._take_results()
            self.best.drop_rest()
        made = self.ranks.broadcast(made)
        self.schedule.start_at(version if made < 0 else made)
        self._due = version if made < 0 else self.schedule.take_due(version)

    def offer(
        self, version: int, policy: PolicyModel, source: Callable[[], WeightSource], ready: Path | None = None
    ) -> None:
        """Export `version`, which the servers just got, if an evaluation is due; and take results that came meanwhile.

        Args:
            version: the step behind the weights.
            policy: has them.
            source: makes the weights' source.
            ready: an export of this version that was just made; None: there is none.
        """
        due, self._due = self._due, None
        if due is None:
            due = self.schedule.take_due(version)
        if self.ranks.is_first:
            self._take_results(before=due)
        if due is not None:
            self._offer(version, due, policy, source, ready)
            if self.ranks.is_first:
                self._take_results()

    def _offer(
        self, version: int, due: int, policy: PolicyModel, source: Callable[[], WeightSource], ready: Path | None
    ) -> None:
        weights = None if ready is not None else source()
        is_wanted = self.ranks.is_first and self._is_wanted(version, weights)
        if not self.ranks.broadcast(int(is_wanted)):
            return
        note = EvaluatedVersion(version=version, due_version=due, incarnation=self.incarnation)
        self._export(note, policy, weights, ready)

    def offer_final(self, version: int, ready: Path) -> None:
        """The final evaluation, which the trainer does not live to see, will measure `version`, exported at `ready`."""
        if not self.ranks.is_first:
            return
        self._take_results()
        if self.best.knows(version, is_final=True) or self._is_best(version):
            return
        note = EvaluatedVersion(version=version, due_version=version, incarnation=self.incarnation)
        own = [each for each in self.best.candidates if each.version == version]
        try:
            if own:
                write_note(self.best.folder(version), replace(own[0], due_version=version))
                return
        except OSError as error:
            _warn(version, error)
            return
        self.best.make_room()
        self._export(note, None, None, ready)

    def _take_results(self, before: int | None = None) -> int:
        """Fold the results that are there, except for those of evaluations due at `before` or later: their version may
        still have to be exported. Returns the newest version that an evaluation was made of; -1: there is none."""
        assert self.results is not None
        while entries := self.results.read(timeout_s=0):
            self._unfolded += [entry.record for entry in entries]
        made = (result.due_version for result in self._unfolded if result.success_rate is not None)
        newest = max(made, default=-1)
        held = [result for result in self._unfolded if before is not None and result.due_version >= before]
        self.best.fold(result for result in self._unfolded if before is None or result.due_version < before)
        self._unfolded = held
        return newest

    def _is_best(self, version: int) -> bool:
        best = self.best.best
        return best is not None and best.version == version

    def _is_wanted(self, version: int, weights: WeightSource | None) -> bool:
        """Rank 0: make room for the export and say whether it is to be made."""
        if self._is_best(version):
            return False
        self.best.make_room()
        if weights is None:
            return True
        root = self.best.folder(version).parent
        export = sum(meta.num_bytes for meta in weights.metadata())
        try:
            root.mkdir(parents=True, exist_ok=True)
            # Training goes on after an export that does not fit, but not after a training state that does not.
            needed, free = export + _newest_state_bytes(root.parent), shutil.disk_usage(root).free
        except OSError as error:
            _warn(version, error)
            return False
        if needed <= free:
            return True
        _warn(version, f"{root} has {free:.3g} bytes left, the model and the next training state take {needed:.3g}")
        return False

    def _export(
        self, note: EvaluatedVersion, policy: PolicyModel | None, weights: WeightSource | None, ready: Path | None
    ) -> None:
        final = self.best.folder(note.version)
        started = self.clock()
        try:
            if ready is None and policy is not None and weights is not None:
                self.exporter.write(final, policy, weights, {NOTE: note_text(note)})
            elif ready is not None and self.ranks.is_first:
                _link_folder(ready, final, note)
        except Exception as error:
            if not _is_of_the_disk(error):
                raise
            _warn(note.version, error)
            if partial_folder(final).exists():
                remove_folder(partial_folder(final))
            return
        if self.ranks.is_first:
            seconds = self.clock() - started
            logger.info("version %d is exported for its evaluation (%s): %.2f s", note.version, KEY, seconds)


def _link_folder(ready: Path, final: Path, note: EvaluatedVersion) -> None:
    """The files of `ready` once more as `final`: the same bytes on the disk, where the file system can do that."""
    partial = start_folder(final)
    shutil.copytree(ready, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
    (partial / NOTE).write_bytes(note_text(note))
    finish_folder(final)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _newest_state_bytes(root: Path) -> int:
    folder = root / "training_state"
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    if not steps:
        return 0
    return sum(path.stat().st_size for path in (folder / str(max(steps))).rglob("*") if path.is_file())


def _is_of_the_disk(error: Exception) -> bool:
    """Tokenizers report a full disk as a plain Exception with the words of the operating system."""
    return isinstance(error, OSError) or "os error" in str(error)


def _warn(version: int, reason: object) -> None:
    logger.warning(
        "version %d is not exported for its evaluation and cannot become the best model: %s. Free some space, or set "
        "%s=null; training goes on",
        version,
        reason,
        KEY,
    )
