"""The preprocessor process: groups in, one batch per optimizer step out, until training is complete. No torch.

    python -m pipelinerl.preprocess.main --run-dir DIR --job NAME

| waits for                 | who wakes it                       | when                                             |
|---------------------------|------------------------------------|--------------------------------------------------|
| groups of the actor       | the stream `actor` (blocking read) | always, unless the queue is full                 |
| room ahead of the trainer | the feed of the stream `trainer`   | a batch is ready but the trainer has two already |
| room in `training_data`   | the trainer, which reads a batch   | a stream has a byte budget and is full           |
| reference log-probs       | the `preprocessor_llm` servers     | with a KL term and a pool of reference servers   |

The feed wakes the blocked read. The end of training ends the loop, and the process with exit code 0.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from pipelinerl.config.schedule import rounds_of, update_interval
from pipelinerl.errors import NoRoom, StreamError
from pipelinerl.preprocess.batcher import (
    Batcher,
    GroupScorer,
    LastStep,
    ReferenceScorer,
    Rejection,
    ResumePoint,
    make_batch,
)
from pipelinerl.preprocess.reference import ReferenceServers
from pipelinerl.records import (
    BatchHead,
    FateRecord,
    Group,
    MetricRecord,
    PassesOver,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
    WeightUpdateSuccess,
    record_time,
)
from pipelinerl.role import RoleContext, run_role
from pipelinerl.streams.base import (
    ACTOR_TOPIC,
    FATES_TOPIC,
    METRICS_TOPIC,
    PASSES_TOPIC,
    PREPROCESSOR_CONSUMER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
    Entry,
)
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import recorded_streams
from pipelinerl.streams.read import Feed, read_all

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 5.0
ACTOR_INSTANCE = "actor_0"
TRAINER_INSTANCE = "finetune_0"
# One batch in training and the next one ready: more would only become stale in the stream.
MAX_STEPS_AHEAD = 2
#: Groups that are queued at once.
_CHUNK_GROUPS = 2


def main(context: RoleContext) -> None:
    """Run the preprocessor until training is done or recorded groups are used up."""
    resume = find_resume_point(context.streams, context.job.name, context.incarnation)
    loop = PreprocessLoop(context, resume, reference_scorer(context))
    logger.info("next step %d, reading %s from offset %d", resume.next_step, ACTOR_TOPIC, resume.actor_offset)
    try:
        loop.run()
    finally:
        loop.close()
    logger.info("training is done")


def reference_scorer(context: RoleContext) -> ReferenceScorer | None:
    """The reference servers of the run; None if no reference log-probs are needed, or the trainer computes them."""
    servers = context.world.jobs_of("preprocessor_llm")
    if not context.config.finetune.rl.needs_reference or context.config.uses_local_reference(bool(servers)):
        return None
    return ReferenceServers(
        [job.url for job in servers if job.url is not None],
        context.token,
        concurrency=context.config.actor.llm_max_rollouts,
        request_timeout_s=context.config.actor.request_timeout_s,
        max_retries=context.config.actor.max_retries,
        return_timeout_s=context.config.vllm_config.start_timeout_s,
    )


def find_resume_point(streams: StreamHub, job_name: str, incarnation: int = 0) -> ResumePoint:
    """Where a restarted preprocessor resumes, read from its own streams: batches, and fates of dropped samples."""
    point = ResumePoint()
    for head in read_all(streams, TRAINING_DATA_TOPIC, job_name, BatchHead):
        point.next_step = max(point.next_step, head.step + 1)
        point.actor_offset = max(point.actor_offset, head.actor_offset)
        point.epochs_done = max(point.epochs_done, head.epochs_done)
        point.dispatched_groups.update(head.group_ids)
        point.step_samples[head.step] = len(head.samples)
        point.first_steps.setdefault(head.incarnation, head.step)
    point.first_steps.setdefault(incarnation, point.next_step)
    for fate in read_all(streams, FATES_TOPIC, job_name, FateRecord):
        if fate.fate != "pending":
            point.settled_samples.update(fate.sample_ids)
    return point


class PreprocessLoop:
    """Reads groups, queues them, and writes a batch whenever one is complete and the trainer is ready for it."""

    def __init__(self, context: RoleContext, resume: ResumePoint, add_reference: ReferenceScorer | None) -> None:
        config, trainer_ranks = context.config, context.world.num_finetune_ranks
        self._heartbeat = context.heartbeat
        self._deadline_s = config.supervise.progress_timeout_s
        self._step = resume.next_step
        self._digested_offset = resume.actor_offset
        self._view = TrainerView(context.incarnation, resume.next_step, bounded=trainer_ranks > 0)
        self._scorer = GroupScorer(config.finetune, resume, add_reference)
        samples_per_step = config.finetune.samples_per_step
        # With max_lag the actor bounds what is in flight; without it the queue is a ring.
        rounds = rounds_of(config)
        unbounded = config.max_lag is None and rounds is None
        self._batcher = Batcher(
            samples_per_step,
            capacity_samples=config.preprocess.ring_buffer_size * samples_per_step if unbounded else None,
            drop_oldest=unbounded and config.pop_old_data,
            # Surplus samples of a round are dropped, not carried over.
            max_version_lag=config.finetune.max_version_lag if rounds is None else rounds.steps - 1,
            rounds=rounds,
            step_samples=resume.step_samples,
        )
        self._finetune, self._num_ranks, self._incarnation = config.finetune, max(trainer_ranks, 1), context.incarnation
        self._outputs = Outputs(context.streams, context.job.name, context.incarnation, is_read=trainer_ranks > 0)
        # Without a trainer, passes end nothing.
        max_epochs = config.finetune.max_epochs if trainer_ranks else None
        self._last_step = LastStep(max_epochs, update_interval(config), resume.next_step - 1, resume.epochs_done)
        recorded = recorded_streams(config)
        # Groups recorded by another run are complete; the work ends with them.
        self._is_recorded, self._used_up = recorded is not None, False
        self._groups = (recorded or context.streams).reader(
            ACTOR_TOPIC,
            ACTOR_INSTANCE,
            Group,
            resume.actor_offset,
            consumer=None if recorded is not None else PREPROCESSOR_CONSUMER,
        )
        self._feed: Feed[TrainerMessage] = Feed(
            context.streams.reader(TRAINER_TOPIC, TRAINER_INSTANCE, TrainerMessage),
            self._on_trainer_message,
            name="trainer",
            on_failure=lambda _: self._groups.wake(),
        )

    def run(self) -> None:
        """Loop until training is done or recorded groups are used up."""
        self._feed.start()
        # NoRoom is raised only when training is done; the samples of that batch stay pending, as those in the queue.
        with contextlib.suppress(NoRoom):
            while not self._view.is_done and not self._used_up:
                entries = self._wait()
                for start in range(0, len(entries), _CHUNK_GROUPS):
                    self._queue(entries[start : start + _CHUNK_GROUPS])
                    self._dispatch()
                self._dispatch()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._outputs.close)
            stack.callback(self._groups.close)
            stack.callback(self._feed.stop)

    def _wait(self) -> Sequence[Entry[Group]]:
        """Block until groups arrive, or the trainer sends a message (an empty list)."""
        if self._is_recorded:
            recorded = self._groups.read(0, max_records=64)
            self._used_up = not recorded
            return recorded
        heard = self._view.changes
        what = "the trainer (queue is full)" if self._batcher.is_full else "groups from the actor"
        with self._heartbeat.waiting(what, self._deadline_s):
            if self._batcher.is_full:
                while not self._feed.wait_for(lambda: self._view.changes != heard, READ_TIMEOUT_S):
                    self._feed.raise_if_failed()
                return []
            while not (entries := self._groups.read(READ_TIMEOUT_S, max_records=64)):
                self._feed.raise_if_failed()
                if self._view.changes != heard:
                    break
            return entries

    def _queue(self, entries: Sequence[Entry[Group]]) -> None:
        for group, rejections in self._scorer.score(entries):
            self._outputs.write_fates(rejections, self._version)
            self._last_step.see(group.record.epochs_done)
            self._outputs.write_fates(self._batcher.add(group), self._version)
        self._digested_offset = entries[-1].offset + 1
        self._heartbeat.progress(len(entries))

    def _dispatch(self) -> None:
        """Write every batch that is complete and that the trainer is ready for."""
        while not self._last_step.is_closed and self._view.may_dispatch(self._step):
            self._outputs.write_fates(self._batcher.purge_stale(self._step), self._version)
            last = self._last_step
            groups = last.close_step(self._batcher, self._step, self._digested_offset)
            if groups is None:
                if last.is_closed and self._finetune.max_epochs is not None:
                    self._outputs.write_passes_over(self._step - 1, self._finetune.max_epochs)
                return
            epochs_done = max(g.record.epochs_done for g in groups) if last.rest_end is None else last.seen_epochs
            oldest = self._batcher.oldest_offset
            statistics = self._scorer.take_statistics()
            offset = self._digested_offset if oldest is None else oldest
            batch = make_batch(
                self._step, groups, self._finetune, self._num_ranks, offset, epochs_done, self._incarnation, statistics
            )
            self._outputs.write_batch(batch)
            self._outputs.write_metrics(self._step, self._batcher.num_batches, statistics)
            self._heartbeat.progress()
            last.close(self._step, epochs_done)
            self._step += 1

    @property
    def _version(self) -> int:
        """Version of the weights that the next batch will train."""
        return self._step - 1

    def _on_trainer_message(self, entry: Entry[TrainerMessage]) -> None:
        self._view.take(entry.record)
        if self._view.is_done:
            self._outputs.stop_waiting()
        self._groups.wake()


class TrainerView:
    """The last known state of the trainer. One thread calls `take`; any thread may read.

    Only messages of this incarnation count: after a resume the trainer reports the checkpoint that it starts from.

    Args:
        incarnation: of this start of the run.
        first_step: the first step that this process dispatches. In the first incarnation the trainer is right before
            it; later ones have to learn where the trainer resumed.
        bounded: False without a trainer: never wait.
    """

    def __init__(self, incarnation: int, first_step: int, bounded: bool = True) -> None:
        self._incarnation = incarnation
        self._first_step = first_step
        self._bounded = bounded
        self.steps_done = first_step - 1 if incarnation == 0 else first_step - 1 - MAX_STEPS_AHEAD
        self.is_done = False
        #: Grows with every message that counts.
        self.changes = 0

    def take(self, message: TrainerMessage) -> None:
        """Handle one message.

        Raises:
            StreamError: the trainer's checkpoint is newer than the last batch in the stream.
        """
        if message.incarnation != self._incarnation:
            return
        if isinstance(message, TrainerStarted) and message.step >= self._first_step:
            last = self._first_step - 1
            raise StreamError(
                f"the trainer resumes after step {message.step}, but the stream training_data ends with the batch of "
                f"step {last}: the machine lost records (see streams.fsync). To resume from an earlier checkpoint, "
                f"move the folders of finetune/training_state after {last} away"
            )
        if isinstance(message, StepDone | TrainerStarted):
            self.steps_done = message.step
        elif isinstance(message, WeightUpdateSuccess):
            # Version v is the result of step v.
            self.steps_done = message.version
        elif isinstance(message, TrainingDone):
            self.is_done = True
        self.changes += 1

    def may_dispatch(self, step: int) -> bool:
        """True if batch `step` may be written now."""
        return not self._bounded or step - self.steps_done <= MAX_STEPS_AHEAD


class Outputs:
    """What the preprocessor writes: fates, batches, metrics and the end of the passes.

    Args:
        is_read: a trainer reads the batches.
    """

    def __init__(self, streams: StreamHub, job_name: str, incarnation: int, *, is_read: bool) -> None:
        self._job_name = job_name
        self._incarnation = incarnation
        self._batches = streams.writer(TRAINING_DATA_TOPIC, job_name, TrainingBatch, is_consumed=is_read)
        self._fates = streams.writer(FATES_TOPIC, job_name, FateRecord)
        self._metrics = streams.writer(METRICS_TOPIC, job_name, MetricRecord)
        self._passes = streams.writer(PASSES_TOPIC, job_name, PassesOver)
        self._reasons: Counter[tuple[str, str]] = Counter()

    def write_fates(self, rejections: Iterable[Rejection], version: int) -> None:
        """Write one record per (group, fate, reason), before the samples are dropped."""
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
            self._reasons[fate, reason] += len(bundle)
        if bundles:
            self._fates.flush()

    def write_batch(self, batch: TrainingBatch) -> None:
        """Publish one optimizer step.

        Raises:
            NoRoom: the stream is full after `stop_waiting`: nobody reads batches any more.
        """
        self._batches.write(batch)
        self._batches.flush()
        logger.info(
            "batch %d: %d samples of %d groups, %d micro-batches%s",
            batch.step,
            len(batch.samples),
            len(batch.group_ids),
            sum(len(rank) for rank in batch.plan),
            "".join(f", {name.partition('/')[2]} {value:.3f}" for name, value in batch.metrics.items()),
        )

    def write_passes_over(self, step: int, max_epochs: int) -> None:
        """Tell the trainer that no batch follows that of `step`."""
        self._passes.write(
            PassesOver(step=step, max_epochs=max_epochs, time=record_time(), incarnation=self._incarnation)
        )
        self._passes.flush()
        logger.info("%d passes over the problems are done, and no samples are left after step %d", max_epochs, step)

    def write_metrics(self, step: int, queue_batches: float, statistics: dict[str, float]) -> None:
        """Write the metrics of one step; counters are totals since this process started."""
        totals: Counter[str] = Counter()
        for (fate, _), count in self._reasons.items():
            totals[fate] += count
        values = {
            "preprocessor/queue_batches": queue_batches,  #: waiting samples, in optimizer steps
            "preprocessor/filtered_samples": float(totals["filtered"]),  #: samples left out by a filter
            "preprocessor/stale_samples": float(totals["stale"]),  #: samples left out because they are too old
            #: samples left out because their data are invalid
            "preprocessor/failed_samples": float(totals["failed"]),
            **statistics,
        }
        for (fate, reason), count in self._reasons.items():
            values[f"preprocessor/{fate}/{reason}"] = float(count)  #: the same by reason
        self._metrics.write(MetricRecord(source=self._job_name, step=step, time=record_time(), values=values))

    def stop_waiting(self) -> None:
        """Training is done: drop a batch for which the stream has no room. Thread-safe."""
        self._batches.end_waits()

    def close(self) -> None:
        for writer in (self._batches, self._fates, self._metrics, self._passes):
            writer.close()


if __name__ == "__main__":
    sys.exit(run_role(main))
