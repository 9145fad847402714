"""The best model by evaluation: `finetune/best`, a link to one of the folders in `finetune/evaluated/<version>`.

An evaluation takes longer than a step, so its result arrives when the weights are gone. The trainer therefore exports a
version when its evaluation is due (a candidate). Once the result is known, the trainer, or the launcher after its end,
settles the candidate: it becomes the best model or is removed. A crash at any point leaves the old or the new best
model, and a candidate that the next start settles or removes. No torch: the launcher imports this.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.records import EvaluationResult
from pipelinerl.rundir.durable import (
    finish_folder,
    partial_folder,
    point_link,
    remove_folder,
    replace_file,
    start_folder,
)
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import StreamReader

if TYPE_CHECKING:
    from pipelinerl.finetune.backends.base import Backend
    from pipelinerl.finetune.model_export import ModelExporter
    from pipelinerl.finetune.ranks import Ranks

logger = logging.getLogger(__name__)

KEY = "finetune.keep_best"
NOTE = "evaluation.json"
# Versions that may wait for their result: the one being measured and the newest.
MAX_CANDIDATES = 2
# The actor's name for several data sets together.
_ALL = "all"


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `evaluation.json`: the version of the weights next to it, and the result of their evaluation.

    The evaluation was due at `due_version`. Without a `value` its result is not known yet. Its tokens were sampled by
    the versions `min_version` to `max_version`.
    """

    version: int
    due_version: int
    incarnation: int
    metric: str | None = None
    value: float | None = None
    num_rollouts: int = 0
    num_failed: int = 0
    min_version: int | None = None
    max_version: int | None = None
    dataset_name: str | None = None


class BestModel:
    """The best model and the candidates below `root` (`finetune` of the run directory).

    Args:
        metric: `success_rate`, `mean_reward`, or a metric of the rollout function. Higher is better.
        max_failure_rate: evaluations with a larger share of failed rollouts are ignored.
    """

    def __init__(self, root: Path, metric: str, max_failure_rate: float) -> None:
        self._root = root
        self._metric = metric
        self._max_failure_rate = max_failure_rate

    def folder(self, version: int) -> Path:
        """Where `version` is exported."""
        return self._root / "evaluated" / str(version)

    @property
    def best(self) -> EvaluatedVersion | None:
        """The best version so far, if any."""
        return _read(self._root / "best")

    @property
    def candidates(self) -> list[EvaluatedVersion]:
        """Exported versions without a result, in evaluation order."""
        best = self._best_folder()
        folders = [folder for folder in self._folders() if folder.name.isdecimal() and folder != best]
        found = [note for note in map(_read, folders) if note is not None]
        return sorted(found, key=lambda note: (note.incarnation, note.due_version))

    def make_room(self) -> None:
        """Make room for another candidate. The oldest is being measured; those after it will not be."""
        for note in self.candidates[1 : len(self.candidates) + 2 - MAX_CANDIDATES]:
            remove_folder(self.folder(note.version))

    def drop_rest(self) -> None:
        """Remove everything but the best model: no more results will come."""
        for folder in self._folders():
            self._remove(folder)

    def settle(self, results: Sequence[EvaluationResult]) -> None:
        """Promote or remove every candidate whose evaluation is over, given all `results` of the run so far."""
        for note in self.candidates:
            own = [each for each in results if each.incarnation == note.incarnation]
            # The first result of an evaluation is over all data sets. Failed ones sort last: the final evaluation may
            # be due at the same version.
            same = [each for each in own if each.due_version == note.due_version]
            same.sort(key=lambda each: each.success_rate is None)
            if same:
                reason = self._why_not(note, same[0], results)
            elif any(each.due_version > note.due_version for each in own):
                reason = "it was not evaluated"
            else:
                continue
            if reason is None:
                self._promote(note, same[0])
            elif self._remove(self.folder(note.version)):
                logger.info("version %d is not kept: %s", note.version, reason)

    def _why_not(
        self, note: EvaluatedVersion, result: EvaluationResult, results: Sequence[EvaluationResult]
    ) -> str | None:
        """Why a candidate cannot be the best one; None: it is."""
        if result.success_rate is None:
            return f"all {result.num_rollouts} rollouts of its evaluation failed"
        if result.num_failed > self._max_failure_rate * result.num_rollouts:
            return f"{result.num_failed} of {result.num_rollouts} rollouts of its evaluation failed"
        if result.min_version != note.version:
            return f"its evaluation began with version {result.min_version}"
        value = self._value(result)
        if value is None:
            known = ", ".join(["success_rate", "mean_reward", *result.metrics])
            logger.warning("%s=%s: evaluations have no such metric (they have %s)", KEY, self._metric, known)
            return f"its evaluation has no metric {self._metric}"
        best = self.best
        old = None if best is None else self._value_of_best(best, result, results)
        # Of equal values, the one measured over fewer versions wins.
        if best is None or old is None or (value, -_num_later(result)) > (old, -_num_later(best)):
            return None
        return f"{self._metric} {value:g}, version {best.version} has {old:g}"

    def _value(self, result: EvaluationResult) -> float | None:
        if self._metric in ("success_rate", "mean_reward"):
            return getattr(result, self._metric)
        return result.metrics.get(self._metric)

    def _value_of_best(
        self, best: EvaluatedVersion, result: EvaluationResult, results: Sequence[EvaluationResult]
    ) -> float | None:
        """None if it was measured on other problems (the configuration changed)."""
        names = {best.dataset_name, result.dataset_name}
        # The same problems may have another name: failed rollouts state none, and several data sets are "all".
        if len(names) > 1 and not (_ALL in names and best.num_rollouts == result.num_rollouts):
            return None
        if best.metric == self._metric:
            return best.value
        key = (best.incarnation, best.due_version)
        same = (self._value(each) for each in results if (each.incarnation, each.due_version) == key)
        return next((value for value in same if value is not None), None)

    def _promote(self, note: EvaluatedVersion, result: EvaluationResult) -> None:
        folder, old, value = self.folder(note.version), self._best_folder(), self._value(result)
        measured = replace(
            note,
            metric=self._metric,
            value=value,
            num_rollouts=result.num_rollouts,
            num_failed=result.num_failed,
            min_version=result.min_version,
            max_version=result.max_version,
            dataset_name=result.dataset_name,
        )
        try:
            write_note(folder, measured)
            point_link(self._root / "best", folder)
        except OSError as error:
            logger.warning(
                "version %d is the best one so far (%s %g), but cannot be kept: %s. Free some space, or set %s=null",
                *(note.version, self._metric, value, error, KEY),
            )
            return
        logger.info(
            "version %d is the best one so far: %s %g, measured over versions %d to %d",
            *(note.version, self._metric, value, result.min_version, result.max_version),
        )
        if old is not None and old != folder and old.exists():
            remove_folder(old)

    def _remove(self, folder: Path) -> bool:
        """Remove `folder` unless it is the best one: on several nodes trainer and launcher may both settle the last
        results."""
        if folder == self._best_folder():
            return False
        remove_folder(folder)
        return True

    def _best_folder(self) -> Path | None:
        link = self._root / "best"
        return self._root / "evaluated" / link.resolve().name if link.is_symlink() else None

    def _folders(self) -> list[Path]:
        root = self._root / "evaluated"
        return sorted(root.iterdir()) if root.is_dir() else []


def best_model_of(config: RunConfig, run_dir: RunDir) -> BestModel | None:
    """The best model of a run; None if not configured."""
    metric = config.finetune.keep_best
    return None if metric is None else BestModel(run_dir.finetune, metric, config.actor.max_failure_rate)


@dataclass
class BestKeeper:
    """Exports versions that are evaluated. All ranks take part in an export, rank 0 settles.

    Args:
        results: all evaluation results of the actor; None on other ranks.
    """

    ranks: Ranks
    schedule: EvaluationSchedule
    backend: Backend
    exporter: ModelExporter
    best: BestModel
    results: StreamReader[EvaluationResult] | None
    incarnation: int
    _due: int | None = field(default=None, init=False)
    _known: list[EvaluationResult] = field(default_factory=list, init=False)

    def begin(self, version: int) -> None:
        """Settle what earlier starts left, before `version` reaches the servers and the actor evaluates.

        If there is no evaluation so far, the actor evaluates the first version.
        """
        made = -1
        if self.ranks.is_first:
            self._settle()
            self.best.drop_rest()
            made = max((each.due_version for each in self._known if each.success_rate is not None), default=-1)
        made = self.ranks.broadcast(made)
        self.schedule.start_at(version if made < 0 else made)
        self._due = version if made < 0 else self.schedule.take_due(version)

    def offer(self, version: int, ready: Path | None = None) -> None:
        """Export `version`, which the servers just got, if an evaluation is due. `ready` is an export of it."""
        due, self._due = self._due, None
        if due is None:
            due = self.schedule.take_due(version)
        if self.ranks.is_first:
            self._settle()
        if due is None:
            return
        if self.ranks.broadcast(int(self.ranks.is_first and not self._is_best(version))):
            self._export(EvaluatedVersion(version=version, due_version=due, incarnation=self.incarnation), ready)
            if self.ranks.is_first:
                self._settle()

    def offer_final(self, version: int, ready: Path) -> None:
        """Keep `version`, exported at `ready`, for the final evaluation, which takes place after the trainer's end."""
        if not self.ranks.is_first:
            return
        self._settle()
        if self._is_best(version) or any(each.due_version == version and each.is_final for each in self._known):
            return
        self._export(EvaluatedVersion(version=version, due_version=version, incarnation=self.incarnation), ready)

    def _settle(self) -> None:
        assert self.results is not None
        while entries := self.results.read(timeout_s=0):
            self._known += [entry.record for entry in entries]
        self.best.settle(self._known)

    def _is_best(self, version: int) -> bool:
        best = self.best.best
        return best is not None and best.version == version

    def _export(self, note: EvaluatedVersion, ready: Path | None) -> None:
        """A full disk costs the candidate, not the run."""
        final = self.best.folder(note.version)
        try:
            if self.ranks.is_first:
                self.best.make_room()
            if ready is None:
                source = self.backend.export_source()
                self.exporter.write(final, self.backend.policy, source, {NOTE: _note_text(note)})
            elif self.ranks.is_first:
                # The same bytes on the disk, where the file system can do that.
                partial = start_folder(final)
                shutil.copytree(ready, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
                (partial / NOTE).write_bytes(_note_text(note))
                finish_folder(final)
        except Exception as error:
            # Tokenizers report a full disk as a plain Exception with the system's message.
            if not isinstance(error, OSError) and "os error" not in str(error):
                raise
            logger.warning(
                "version %d is not exported for its evaluation and cannot become the best model: %s. Free some space, "
                "or set %s=null",
                *(note.version, error, KEY),
            )
            if partial_folder(final).exists():
                remove_folder(partial_folder(final))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _num_later(measured: EvaluationResult | EvaluatedVersion) -> int:
    """Number of versions after the first one in an evaluation."""
    return (measured.max_version or 0) - (measured.min_version or 0)


def _note_text(note: EvaluatedVersion) -> bytes:
    return msgspec.json.format(msgspec.json.encode(note), indent=1) + b"\n"


def write_note(folder: Path, note: EvaluatedVersion) -> None:
    """Replace `evaluation.json` atomically. Raises OSError."""
    replace_file(folder / NOTE, _note_text(note), durable=True)


def _read(folder: Path) -> EvaluatedVersion | None:
    """None: no complete export."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=EvaluatedVersion)
    except (OSError, msgspec.DecodeError):
        return None
