"""The best model by evaluation: `finetune/best`, a link to one of the folders in `finetune/evaluated/<version>`.

The trainer exports a version there when its evaluation falls due (a candidate). Whoever learns the result, the trainer
while it lives and the launcher behind its end, folds it in here: the candidate takes the best one's place, or goes.
Waits for the disk only. A crash at any point leaves the old best model or the new one, and a candidate that the next
start settles or removes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.records import EvaluationResult
from pipelinerl.rundir.durable import point_link, remove_folder, replace_file
from pipelinerl.rundir.layout import RunDir

logger = logging.getLogger(__name__)

KEY = "finetune.keep_best"
NOTE = "evaluation.json"
# At most so many versions wait for their result: the one that is being measured, and the newest one.
MAX_CANDIDATES = 2
# What the actor calls several data sets together.
_ALL = "all"
_OWN_METRICS = {"success_rate": "success_rate", "mean_reward": "mean_reward"}


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `evaluation.json`: which weights lie beside it, and what their evaluation came to.

    `version` is the number of optimizer steps behind the weights, `due_version` names the evaluation. Without a `value`
    the result is not known yet. Tokens of the evaluation were sampled by the versions `min_version` to `max_version`.
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
        metric: `success_rate`, `mean_reward`, or a metric of the rollout function. The higher, the better.
        max_failure_rate: an evaluation in which a larger share of the rollouts failed measures nothing.
    """

    def __init__(self, root: Path, metric: str, max_failure_rate: float) -> None:
        self._root = root
        self._metric = metric
        self._max_failure_rate = max_failure_rate
        self._folded: set[tuple[int, int, bool]] = set()
        self._values: dict[tuple[int, int], float] = {}

    def folder(self, version: int) -> Path:
        """Where `version` is exported."""
        return self._root / "evaluated" / str(version)

    @property
    def best(self) -> EvaluatedVersion | None:
        """The best version so far; None: there is none yet."""
        return _read(self._root / "best")

    @property
    def candidates(self) -> list[EvaluatedVersion]:
        """Versions whose result has not been taken yet, in the order in which they were exported."""
        best = self._best_folder()
        folders = [folder for folder in self._folders() if folder.name.isdecimal() and folder != best]
        found = [note for note in map(_read, folders) if note is not None]
        return sorted(found, key=lambda note: (note.incarnation, note.due_version))

    def make_room(self) -> None:
        """Let one more candidate be exported. The oldest one is being measured; what came behind it will not be."""
        for note in self.candidates[1 : len(self.candidates) + 2 - MAX_CANDIDATES]:
            remove_folder(self.folder(note.version))

    def fold(self, results: Iterable[EvaluationResult]) -> None:
        """Take results, in the order of their stream; those that were taken before change nothing.

        Of the results of one evaluation the first is over all data sets.
        """
        results = list(results)
        measured = {(each.incarnation, each.due_version) for each in results if each.success_rate is not None}
        for result in results:
            key = (result.incarnation, result.due_version, result.is_final)
            if result.success_rate is None:
                # It was not made: the next start may make it. The final one may be due at the same version.
                if key[:2] not in measured:
                    self._settle(result)
            elif key not in self._folded:
                self._folded.add(key)
                self._settle(result)

    def knows(self, due_version: int, is_final: bool) -> bool:
        """Whether any start of the run has made that evaluation."""
        return any((due, final) == (due_version, is_final) for _, due, final in self._folded)

    def drop_rest(self) -> None:
        """Remove everything but the best model: no result comes for it any more."""
        for folder in self._folders():
            self._remove(folder)

    def _settle(self, result: EvaluationResult) -> None:
        value = self._value(result)
        if value is not None:
            self._values.setdefault((result.incarnation, result.due_version), value)
        for note in self.candidates:
            if note.incarnation != result.incarnation or note.due_version > result.due_version:
                continue
            reason = self._why_not(note, result, value)
            if reason is None and value is not None:
                self._promote(note, result, value)
                continue
            if self._remove(self.folder(note.version)):
                logger.info("version %d is not kept: %s", note.version, reason)

    def _why_not(self, note: EvaluatedVersion, result: EvaluationResult, value: float | None) -> str | None:
        """Why a candidate cannot be the best one; None: it is."""
        if note.due_version < result.due_version:
            return "it was not evaluated"
        if result.success_rate is None:
            return f"all {result.num_rollouts} rollouts of its evaluation failed"
        if result.num_failed > self._max_failure_rate * result.num_rollouts:
            return f"{result.num_failed} of {result.num_rollouts} rollouts of its evaluation failed"
        if result.min_version != note.version:
            return f"its evaluation began with version {result.min_version}"
        if value is None:
            known = ", ".join([*_OWN_METRICS, *result.metrics])
            logger.warning("%s=%s: evaluations have no such metric (they have %s)", KEY, self._metric, known)
            return f"its evaluation has no metric {self._metric}"
        best = self.best
        if best is None:
            return None
        old = self._value_of_best(best, result)
        # Of equal values the one counts for more that fewer versions had a part in.
        if old is None or (value, -_num_later(result)) > (old, -_num_later(best)):
            return None
        return f"{self._metric} {value:g}, version {best.version} has {old:g}"

    def _value(self, result: EvaluationResult) -> float | None:
        own = _OWN_METRICS.get(self._metric)
        return getattr(result, own) if own is not None else result.metrics.get(self._metric)

    def _value_of_best(self, best: EvaluatedVersion, result: EvaluationResult) -> float | None:
        """None: it was measured by something else (the configuration changed) and cannot be compared."""
        names = {best.dataset_name, result.dataset_name}
        # Of the same problems it may change too: failed rollouts do not say a name that others do, and two are "all".
        if len(names) > 1 and not (_ALL in names and best.num_rollouts == result.num_rollouts):
            return None
        if best.metric == self._metric:
            return best.value
        return self._values.get((best.incarnation, best.due_version))

    def _promote(self, note: EvaluatedVersion, result: EvaluationResult, value: float) -> None:
        folder, old = self.folder(note.version), self._best_folder()
        try:
            write_note(
                folder,
                msgspec.structs.replace(
                    note,
                    metric=self._metric,
                    value=value,
                    num_rollouts=result.num_rollouts,
                    num_failed=result.num_failed,
                    min_version=result.min_version,
                    max_version=result.max_version,
                    dataset_name=result.dataset_name,
                ),
            )
            point_link(self._root / "best", folder)
        except OSError as error:
            logger.warning(
                "version %d is the best one by now (%s %g), but cannot be kept: %s. Free some space, or set %s=null",
                *(note.version, self._metric, value, error, KEY),
            )
            return
        logger.info(
            "version %d is the best one by now: %s %g, measured over versions %d to %d",
            *(note.version, self._metric, value, result.min_version, result.max_version),
        )
        if old is not None and old != folder and old.exists():
            remove_folder(old)

    def _remove(self, folder: Path) -> bool:
        """Remove `folder`, unless it is the best one by now: with several nodes, trainer and launcher may both take the
        last results, and what one of them has just kept is no better than the best one for the other."""
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


def _num_later(measured: EvaluationResult | EvaluatedVersion) -> int:
    """How many versions behind the first one had a part in an evaluation."""
    return (measured.max_version or 0) - (measured.min_version or 0)


def best_model_of(config: RunConfig, run_dir: RunDir) -> BestModel | None:
    """The best model of a run; None: the configuration does not ask for one."""
    metric = config.finetune.keep_best
    return None if metric is None else BestModel(run_dir.finetune, metric, config.actor.max_failure_rate)


def note_text(note: EvaluatedVersion) -> bytes:
    """`note` as the content of `evaluation.json`."""
    return msgspec.json.format(msgspec.json.encode(note), indent=1) + b"\n"


def write_note(folder: Path, note: EvaluatedVersion) -> None:
    """Replace `evaluation.json` in one step. Raises OSError if the disk does not take it."""
    replace_file(folder / NOTE, note_text(note), durable=True)


def _read(folder: Path) -> EvaluatedVersion | None:
    """None: there is no whole export."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=EvaluatedVersion)
    except (OSError, msgspec.DecodeError):
        return None
