"""`RunState`: everything that table, plot and summary show, folded from the run's streams.

Takes one record at a time, in any order between streams. Pure: no I/O, no waits. A resumed run folds its streams from
their beginning, so the state is never saved.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pipelinerl.records import (
    EvaluationResult,
    FateRecord,
    MetricRecord,
    StepDone,
    TrainerMessage,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.records.lineage import Lineage

When = Literal["before", "after"]
Phase = Literal["starting", "training", "done"]

# Reward and success of training wherever they are shown: over all rollouts that a step's batch was chosen from. The
# first name with data counts; the others are for stages without a preprocessor.
REWARD = ("preprocessor/reward_mean", "finetune/reward_mean", "actor/reward_mean")
SUCCESS = ("preprocessor/success_rate", "actor/success_rate")


class RunState:
    """State of one run. `latest[name]` is the newest value, `history[name][step]` the newest of each version.

    `phase` is that of start `incarnation`, which trains once the servers have their first weights.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self.latest: dict[str, float] = {}
        self.history: dict[str, dict[int, float]] = {}
        self.evaluations: list[EvaluationResult] = []
        self.lineage = Lineage()
        self.version: int | None = None
        self.weight_updates = 0
        self.last_update_seconds: dict[str, float] = {}
        self.probe_diffs: list[float] = []
        self.phase: Phase = "starting"
        self.first_time: float | None = None
        self.last_time: float | None = None
        self._fates: Counter[tuple[str, int, int]] = Counter()
        self._tokens: Counter[tuple[str, int, int]] = Counter()
        self._paused_s = 0.0
        self._begin: dict[int, float] = {}
        self._end: dict[int, float] = {}

    def fold_metrics(self, record: MetricRecord) -> None:
        self._saw(record.time)
        self.latest.update(record.values)
        for name, value in record.values.items():
            self.history.setdefault(name, {})[record.step] = value

    def fold_trainer(self, message: TrainerMessage) -> None:
        self._saw(message.time)
        incarnation = message.incarnation
        self.lineage.add(message)
        if isinstance(message, WeightUpdateSuccess):
            self.version = message.version
            self.weight_updates += 1
            self.last_update_seconds = message.seconds
            if message.probe_abs_diff is not None:
                self.probe_diffs.append(message.probe_abs_diff)
            if incarnation in self._begin:
                self._paused_s += message.seconds.get("paused", message.seconds.get("total", 0.0))
            else:
                # The first update of a start pauses servers that are still idle.
                self._begin[incarnation] = message.time
        if isinstance(message, StepDone | TrainingDone):
            self._end[incarnation] = max(message.time, self._end.get(incarnation, message.time))
        if incarnation == self._incarnation:
            if isinstance(message, TrainingDone):
                self.phase = "done"
            elif isinstance(message, WeightUpdateSuccess) and self.phase == "starting":
                self.phase = "training"

    def fold_evaluation(self, result: EvaluationResult) -> None:
        self._saw(result.time)
        self.evaluations.append(result)

    def fold_fate(self, record: FateRecord) -> None:
        if record.fate == "pending":
            return
        with_samples = {sample_id.rpartition("/")[0] for sample_id in record.sample_ids}
        count = len(record.sample_ids) + max(0, record.num_rollouts - len(with_samples))
        self._fates[record.fate, record.incarnation, record.version] += count
        self._tokens[record.fate, record.incarnation, record.version] += record.output_tokens

    @property
    def steps(self) -> int:
        return self.lineage.last_step

    @property
    def fates(self) -> dict[str, int]:
        """Samples (and rollouts without samples) by fate; training that was rolled back does not count."""
        return self._by_fate(self._fates)

    @property
    def fate_tokens(self) -> dict[str, int]:
        """Sampled tokens by fate."""
        return self._by_fate(self._tokens)

    def _by_fate(self, numbers: Counter[tuple[str, int, int]]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for (fate, incarnation, version), count in numbers.items():
            if fate != "trained" or self.lineage.survives(incarnation, version):
                counts[fate] += count
        return dict(counts)

    @property
    def training_seconds(self) -> float:
        """Wall-clock seconds of training: from the servers' first weights (and the evaluation before training) to the
        last step, summed over starts."""
        begin = dict(self._begin)
        for result in self.evaluations:
            if result.due_version == 0 and not result.is_final and result.incarnation in begin:
                begin[result.incarnation] = max(begin[result.incarnation], result.time)
        return sum(max(0.0, end - begin[inc]) for inc, end in self._end.items() if inc in begin)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the servers were paused for weight updates."""
        return self._paused_s

    @property
    def output_tokens(self) -> float:
        """Tokens sampled for training whose fate is known."""
        return max(float(self._tokens.total()), self.total("finetune/output_tokens"))

    def by_step(self, names: tuple[str, ...]) -> dict[int, float]:
        """Values by step of the first of `names` with data."""
        return next((found for name in names if (found := self.history.get(name))), {})

    def curve(self, names: tuple[str, ...]) -> dict[int, float]:
        """`by_step` up to the newest step, without batches that are ready but not trained."""
        steps = self.steps
        return {step: value for step, value in sorted(self.by_step(names).items()) if step <= steps}

    def total(self, name: str) -> float:
        """Sum of a metric over the steps that count."""
        steps = self.steps
        return sum(value for step, value in self.history.get(name, {}).items() if step <= steps)

    def mean(self, name: str, weight_name: str) -> float:
        """Mean of a metric over the steps that count, weighted by another one (1 where it is absent)."""
        weights, steps = self.history.get(weight_name, {}), self.steps
        parts = [(v, weights.get(s, 1.0)) for s, v in self.history.get(name, {}).items() if s <= steps]
        total = sum(weight for _, weight in parts)
        return sum(value * weight for value, weight in parts) / total if total > 0 else 0.0

    def held_out_success(self, when: When) -> float | None:
        """Success rate before training (due at version 0) or after it (final), over all data sets, weighted by
        rollouts; None if there was no such evaluation."""
        found = [r for r in self.evaluations if (r.is_final if when == "after" else r.due_version == 0)]
        if when == "after":
            # A complete run may have been continued: the last evaluation counts.
            newest = max(((r.due_version, r.incarnation) for r in found), default=None)
            found = [r for r in found if (r.due_version, r.incarnation) == newest]
        if when == "before" and any(not result.is_final for result in found):
            found = [result for result in found if not result.is_final]
        rates = [(r.success_rate, r.num_rollouts) for r in found if r.success_rate is not None]
        rollouts = sum(count for _, count in rates)
        return sum(rate * count for rate, count in rates) / rollouts if rollouts else None

    def _saw(self, time: float) -> None:
        self.first_time = time if self.first_time is None else min(time, self.first_time)
        self.last_time = time if self.last_time is None else max(time, self.last_time)
