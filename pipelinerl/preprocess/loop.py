"""Main of the preprocessor: groups in, one batch per optimizer step out, until training is complete.

| waits for                 | who wakes it                       | when                                             |
|---------------------------|------------------------------------|--------------------------------------------------|
| groups of the actor       | the stream `actor` (blocking read) | always, unless the queue is full                 |
| room ahead of the trainer | the feed of the stream `trainer`   | a batch is ready but the trainer has two already |
| room in `training_data`   | the trainer, which takes a batch   | with streams=redis, until training is done       |
| reference log-probs       | the `preprocessor_llm` servers     | with a KL term                                   |

The first two end in the same call: the feed wakes the blocked read. Training done ends the loop, and the process with
exit code 0.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from pipelinerl.config.schedule import rounds_of, update_interval
from pipelinerl.errors import NoRoom
from pipelinerl.preprocess.batcher import Batcher, ClosedStep
from pipelinerl.preprocess.dispatch import TrainerView
from pipelinerl.preprocess.intake import Intake, ReferenceScorer
from pipelinerl.preprocess.last_step import LastStep
from pipelinerl.preprocess.outputs import Outputs
from pipelinerl.preprocess.recovery import ResumePoint, find_resume_point
from pipelinerl.records import Group, TrainerMessage
from pipelinerl.role import RoleContext
from pipelinerl.run.recorded_streams import recorded_streams
from pipelinerl.streams.base import ACTOR_TOPIC, PREPROCESSOR_CONSUMER, TRAINER_TOPIC, Entry
from pipelinerl.streams.feed import Feed

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 5.0
ACTOR_INSTANCE = "actor_0"
TRAINER_INSTANCE = "finetune_0"


def preprocess(context: RoleContext) -> None:
    """Run the preprocessor of a run until the trainer says that training is done, or what was recorded is used up."""
    resume = find_resume_point(context.streams, context.job.name, context.incarnation)
    loop = PreprocessLoop(context, resume, reference_scorer(context))
    logger.info("next step %d, reading %s from offset %d", resume.next_step, ACTOR_TOPIC, resume.actor_offset)
    try:
        loop.run()
    finally:
        loop.close()
    logger.info("training is done")


class PreprocessLoop:
    """The parts of one preprocessor and the loop over them."""

    def __init__(self, context: RoleContext, resume: ResumePoint, add_reference: ReferenceScorer | None) -> None:
        config, trainer_ranks = context.config, context.world.num_finetune_ranks
        self._heartbeat = context.heartbeat
        self._deadline_s = config.supervise.progress_timeout_s
        self._chunk_groups = config.preprocess.chunk_n_groups
        self._step = resume.next_step
        self._digested_offset = resume.actor_offset
        self._view = TrainerView(context.incarnation, resume.next_step, bounded=trainer_ranks > 0)
        self._intake = Intake(config.finetune, resume, add_reference)
        samples_per_step = config.finetune.samples_per_step
        # With max_lag the actor bounds what is in flight; without it the queue is a ring.
        rounds = rounds_of(config)
        unbounded = config.max_lag is None and rounds is None
        self._batcher = Batcher(
            samples_per_step,
            capacity_samples=config.preprocess.ring_buffer_size * samples_per_step if unbounded else None,
            drop_oldest=unbounded and config.pop_old_data,
            # What a round has too many is never trained in another one.
            max_version_lag=config.finetune.max_version_lag if rounds is None else rounds.steps - 1,
            rounds=rounds,
            step_samples=resume.step_samples,
        )
        self._outputs = Outputs(
            context.streams,
            context.job.name,
            context.incarnation,
            config.finetune,
            max(trainer_ranks, 1),
            has_trainer=trainer_ranks > 0,
            finish_in_trainer=config.finishes_advantages_in_trainer(bool(context.world.jobs_of("preprocessor_llm"))),
        )
        # Without a trainer nobody ends with the passes.
        max_epochs = config.finetune.max_epochs if trainer_ranks else None
        self._last_step = LastStep(max_epochs, update_interval(config), resume.next_step - 1, resume.epochs_done)
        recorded = recorded_streams(config)
        # The groups of another run are all there; when they are used up, so is the work.
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
        self._feed.start()
        # There is no room only when training is done; what the batch held is as pending as what the queue holds.
        with contextlib.suppress(NoRoom):
            while not self._view.is_done and not self._used_up:
                entries = self._wait()
                for start in range(0, len(entries), self._chunk_groups):
                    self._take(entries[start : start + self._chunk_groups])
                    self._dispatch()
                self._dispatch()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._outputs.close)
            stack.callback(self._groups.close)
            stack.callback(self._feed.stop)

    def _wait(self) -> Sequence[Entry[Group]]:
        """Block until groups came in or the trainer said something; the latter gives an empty list."""
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

    def _take(self, entries: Sequence[Entry[Group]]) -> None:
        for group, rejections in self._intake.digest(entries):
            self._outputs.write_fates(rejections, self._version)
            self._last_step.see(group.epochs_done)
            self._outputs.write_fates(self._batcher.add(group), self._version)
        self._digested_offset = entries[-1].offset + 1
        self._heartbeat.progress(len(entries))

    def _dispatch(self) -> None:
        while not self._last_step.is_closed and self._view.may_dispatch(self._step):
            self._outputs.write_fates(self._batcher.purge_stale(self._step), self._version)
            closed = self._close_step()
            if closed is None:
                return
            epochs_done = closed.epochs_done if self._last_step.rest_end is None else self._last_step.seen_epochs
            oldest = self._batcher.oldest_offset
            statistics = self._intake.statistics.take()
            self._outputs.write_batch(
                closed, self._digested_offset if oldest is None else oldest, epochs_done, statistics
            )
            self._outputs.write_metrics(self._step, self._batcher.num_batches, statistics)
            self._heartbeat.progress()
            self._last_step.close(self._step, epochs_done)
            self._step += 1

    def _close_step(self) -> ClosedStep | None:
        """The next batch, the last of the passes with what there is for it. None: there is nothing to write yet, or
        nothing any more."""
        last = self._last_step
        if last.rest_end is None and (closed := self._batcher.close_step(self._step)):
            return closed
        if last.max_epochs is None or not last.wait_no_longer(self._digested_offset):
            return None
        rest = self._batcher.close_rest(self._step, last.rest_end or 0)
        if rest is None:
            self._outputs.write_passes_over(self._step - 1, last.max_epochs)
            last.give_up()
        return rest

    @property
    def _version(self) -> int:
        """Version of the weights that the next batch will train."""
        return self._step - 1

    def _on_trainer_message(self, entry: Entry[TrainerMessage]) -> None:
        self._view.take(entry.record)
        if self._view.is_done:
            self._outputs.stop_waiting()
        self._groups.wake()


def reference_scorer(context: RoleContext) -> ReferenceScorer | None:
    """The scorer over the run's reference servers, or None if the algorithm needs no reference log-probs or the
    trainer computes them beside itself."""
    servers = context.world.jobs_of("preprocessor_llm")
    if not context.config.finetune.rl.needs_reference or context.config.uses_local_reference(bool(servers)):
        return None
    from pipelinerl.preprocess.reference import ReferenceServers

    return ReferenceServers(
        [job.url for job in servers if job.url is not None],
        context.token,
        context.config.sampling_temperature,
        concurrency=context.config.actor.llm_max_rollouts,
        request_timeout_s=context.config.actor.request_timeout_s,
        max_retries=context.config.actor.max_retries,
        return_timeout_s=context.config.vllm_config.start_timeout_s,
    )
