"""Everything that the preprocessor writes: fates, batches, metrics. Called by the loop.

Waits for the disk, and in Redis for room: with `streams=redis` a batch may have to wait until the trainer took others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.preprocess.batcher import ClosedStep
from pipelinerl.preprocess.filters import Rejection
from pipelinerl.preprocess.scoring import finish_step
from pipelinerl.records import FateRecord, MetricRecord, PassesOver, TrainingBatch
from pipelinerl.rl.packing import make_plan
from pipelinerl.streams.base import FATES_TOPIC, METRICS_TOPIC, PASSES_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub

logger = logging.getLogger(__name__)


class Outputs:
    """Writers of one preprocessor and the counters that go with them."""

    def __init__(
        self,
        streams: StreamHub,
        job_name: str,
        incarnation: int,
        config: FinetuneConfig,
        num_ranks: int,
        has_trainer: bool = True,
        finish_in_trainer: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job_name = job_name
        self._incarnation = incarnation
        self._config = config
        self._num_ranks = num_ranks
        self._finish_in_trainer = finish_in_trainer
        self._clock = clock
        self._batches = streams.writer(TRAINING_DATA_TOPIC, job_name, TrainingBatch, is_consumed=has_trainer)
        self._fates = streams.writer(FATES_TOPIC, job_name, FateRecord)
        self._metrics = streams.writer(METRICS_TOPIC, job_name, MetricRecord)
        self._passes = streams.writer(PASSES_TOPIC, job_name, PassesOver)
        self._counts: Counter[str] = Counter()

    def write_fates(self, rejections: Iterable[Rejection], version: int) -> None:
        """One record for each (group, fate, reason): written before the samples are dropped."""
        bundles: dict[tuple[str, str, str], list[Rejection]] = {}
        for rejection in rejections:
            key = (rejection.sample.group_id, rejection.fate, rejection.reason)
            bundles.setdefault(key, []).append(rejection)
        for (group_id, _, reason), bundle in bundles.items():
            fate = bundle[0].fate
            self._fates.write(
                FateRecord(
                    sample_ids=[r.sample.id for r in bundle],
                    fate=fate,
                    reason=reason,
                    version=version,
                    group_id=group_id,
                    source=self._job_name,
                    output_tokens=sum(r.sample.output_tokens for r in bundle),
                    incarnation=self._incarnation,
                )
            )
            self._counts[fate] += len(bundle)
            self._counts[f"{fate}/{reason}"] += len(bundle)
        if bundles:
            self._fates.flush()

    def write_batch(
        self, closed: ClosedStep, actor_offset: int, epochs_done: float, statistics: dict[str, float]
    ) -> None:
        """Finish the advantages, plan and publish one optimizer step.

        Raises:
            NoRoom: the stream is full, and after `stop_waiting` nobody takes a batch any more.
        """
        samples = finish_step(closed.samples, self._config.rl, self._finish_in_trainer)
        plan = make_plan(
            [len(item.sample.input_ids) for item in samples],
            self._num_ranks,
            self._config.seq_length,
            self._config.seq_packing,
            self._config.train_batch_size,
        )
        self._batches.write(
            TrainingBatch(
                id=f"{self._incarnation}-{closed.step}",
                step=closed.step,
                samples=samples,
                group_ids=[group.group_id for group in closed.groups],
                plan=plan,
                actor_offset=actor_offset,
                epochs_done=epochs_done,
                incarnation=self._incarnation,
                metrics=statistics,
            )
        )
        self._batches.flush()
        logger.info(
            "batch %d: %d samples of %d groups, %d micro-batches%s",
            closed.step,
            len(samples),
            len(closed.groups),
            sum(len(rank) for rank in plan),
            "".join(f", {name.partition('/')[2]} {value:.3f}" for name, value in statistics.items()),
        )

    def write_passes_over(self, step: int, max_epochs: int) -> None:
        """Tell the trainer that no batch follows that of `step`."""
        self._passes.write(
            PassesOver(step=step, max_epochs=max_epochs, time=self._clock(), incarnation=self._incarnation)
        )
        self._passes.flush()
        logger.info("%d passes over the problems are done, and nothing is left for a batch behind %d", max_epochs, step)

    def write_metrics(self, step: int, queue_batches: float, statistics: dict[str, float]) -> None:
        """Counters are totals since this process started."""
        values = {
            "preprocessor/queue_batches": queue_batches,
            "preprocessor/filtered_samples": float(self._counts["filtered"]),
            "preprocessor/stale_samples": float(self._counts["stale"]),
            "preprocessor/failed_samples": float(self._counts["failed"]),
            **statistics,
        }
        values |= {f"preprocessor/{name}": float(n) for name, n in self._counts.items() if "/" in name}
        self._metrics.write(MetricRecord(source=self._job_name, step=step, time=self._clock(), values=values))

    def stop_waiting(self) -> None:
        """Training is done: a batch for which the stream has no room is not written. Any thread may call it."""
        self._batches.end_waits()

    def close(self) -> None:
        for writer in (self._batches, self._fates, self._metrics, self._passes):
            writer.close()
