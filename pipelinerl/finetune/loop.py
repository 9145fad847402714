"""The trainer's loop: fetch a batch, take a step, update the servers, report, save. All ranks run it.

What a rank waits for, and what wakes it:

| wait                                        | woken by                                             |
|---------------------------------------------|------------------------------------------------------|
| feed: the next `TrainingBatch`              | the preprocessor's write, SIGTERM, a server, the end |
| steps: the other ranks                      | their last backward                                  |
| pauses: running rollouts (not `pipeline`)    | the actor's answer on stream `turns`                 |
| weights: the servers                        | their answers, or the sync time-out                  |
| checkpoints: the other ranks, the disk      | their shards                                         |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, perf_counter

import torch
from msgspec.structs import replace

from pipelinerl.config.schedule import EvaluationSchedule, update_interval
from pipelinerl.config.task import LLMParameters
from pipelinerl.errors import StreamError, WeightSyncError
from pipelinerl.finetune.backends import create_backend
from pipelinerl.finetune.best_model import BestKeeper, best_model_of
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState
from pipelinerl.finetune.data_feed import DataFeed, PassesEnd, StopRequest, TargetReached, stop_on_sigterm
from pipelinerl.finetune.model import load_policy, load_reference
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.pauses import open_pauses, wait_for_servers
from pipelinerl.finetune.probe import batch_tokens, probe_is_due, text_tokens
from pipelinerl.finetune.ranks import Ranks, joined_ranks
from pipelinerl.finetune.report import Reporter, StepTimes, peak_memory, step_metrics
from pipelinerl.finetune.step import StepResult, StepRunner
from pipelinerl.finetune.token_ratios import RatioRecorder
from pipelinerl.finetune.weight_sync import WeightSync, check_checkpoint, open_pool, update_is_due
from pipelinerl.llm.tokens import load_tokenizer
from pipelinerl.records import (
    EvaluationResult,
    FateRecord,
    MetricRecord,
    PassesOver,
    TokenRatios,
    TrainerMessage,
    TrainingBatch,
)
from pipelinerl.rl.diagnostics import ON_POLICY_DIFF, ON_POLICY_TOKENS
from pipelinerl.role import RoleContext
from pipelinerl.streams.base import (
    ACTOR_TOPIC,
    EVALUATION_TOPIC,
    FATES_TOPIC,
    METRICS_TOPIC,
    PASSES_TOPIC,
    TOKEN_RATIOS_TOPIC,
    TRAINER_CONSUMER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
    StreamReader,
)
from pipelinerl.streams.hub import backend_of
from pipelinerl.streams.open_run import recorded_streams
from pipelinerl.streams.recorder import MetricRecorder

logger = logging.getLogger(__name__)

PREPROCESSOR = "preprocessor_0"
ACTOR = "actor_0"
#: Largest mean gap between trainer and server in nats. Rounding in bf16 gives 0.02 on answers with high entropy, a
#: quantized server about 0.1, a broken one more than 1.
MAX_ON_POLICY_DIFF = 0.5
#: Fewer tokens say little.
MIN_ON_POLICY_TOKENS = 256


def run_trainer(context: RoleContext, environ: Mapping[str, str]) -> TrainerState:
    """Train to the end or until SIGTERM; returns the final state.

    Waits for the other ranks (process group) and, on rank 0, for the servers to come up.
    """
    config = context.config
    if context.world.device == "cpu":
        torch.set_num_threads(max(context.job.cores, 1))
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        if context.world.device == "cuda" and config.world.placement == "colocated":
            wait_for_servers(context)
        # Rank 0 waits for data and the others wait for rank 0: it reports first.
        timeout_s = config.supervise.progress_timeout_s + 60
        ranks = stack.enter_context(joined_ranks(environ, context.world.device, timeout_s, rendezvous_file(context)))
        return Trainer(context, ranks, stack).run()


def rendezvous_file(context: RoleContext) -> Path | None:
    """File through which the ranks of one machine find each other in this start; None with several machines."""
    if context.world.world_size > 1:
        return None
    return context.run_dir.finetune / f".ranks-{context.run_id}-{context.incarnation}"


class Trainer:
    """One rank of the trainer, resumed from the newest training state.

    Args:
        stack: closes what is opened here.
    """

    def __init__(self, context: RoleContext, ranks: Ranks, stack: ExitStack) -> None:
        config = context.config
        self.context, self.ranks, self.config = context, ranks, config.finetune
        self.has_servers = bool(context.world.jobs_of("actor_llm"))
        self.update_interval = update_interval(config)
        self.heartbeat = context.heartbeat
        policy = load_policy(config, ranks.device, ranks)
        # Before the backend: it may shard or wrap the policy.
        has_reference_servers = bool(context.world.jobs_of("preprocessor_llm"))
        reference = load_reference(config, policy, ranks.device, has_reference_servers, ranks)
        self.backend = create_backend(policy, config, ranks)
        if self.has_servers:
            check_checkpoint(self.backend, config.model_path)
        self.checkpoints = CheckpointStore(
            context.run_dir.finetune / "training_state",
            ranks,
            self.config.keep_last_checkpoints,
            frozenset(self.config.also_save_steps),
        )
        restored = self.checkpoints.restore(self.backend) or TrainerState()
        self.state = replace(restored, incarnation=context.incarnation)
        self.exporter = ModelExporter(
            context.run_dir.finetune,
            config.model_path,
            ranks,
            self.config.keep_intermediate_checkpoints,
            frozenset(self.config.also_save_steps),
            trust_remote_code=self.config.trust_remote_code,
        )
        tokenizer = load_tokenizer(config.model_path, trust_remote_code=self.config.trust_remote_code)
        self.first_probe = text_tokens(tokenizer, policy.language_model.config.get_text_config().vocab_size)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.ratios = self._open_ratios(stack)
        self.steps = StepRunner(
            self.backend,
            self.config,
            ranks,
            pad_id,
            reference,
            self.heartbeat.progress,
            self._step_ending,
            self.ratios,
        )
        self.reporter = self._open_reporter(stack) if ranks.is_first else None
        self._connect(stack)

    def _connect(self, stack: ExitStack) -> None:
        """Open the streams that this rank reads and, on rank 0, the connections to the servers."""
        context, config, ranks = self.context, self.context.config, self.ranks
        reader = self._open_batches(stack)
        publisher = passes = target = None
        self.weights: WeightSync | None = None
        if self.has_servers:
            pool = open_pool(context, stack, reader.wake) if ranks.is_first else None
            publisher = pool.publisher if pool else None
            start_timeout_s = config.vllm_config.start_timeout_s
            packed = self.config.seq_packing
            self.weights = WeightSync(self.backend, ranks, pool, self.first_probe, start_timeout_s, packed)
        self.stop = StopRequest(ranks)
        self.pauses = open_pauses(context, ranks, self.backend, publisher, self.stop, stack)

        def wake() -> None:
            reader.wake()
            self.pauses.wake()

        stack.enter_context(stop_on_sigterm(self.stop, wake))
        max_epochs = self.config.max_epochs
        if ranks.is_first and max_epochs is not None and context.world.jobs_of("preprocessor"):
            passes = PassesEnd(context.streams.reader(PASSES_TOPIC, PREPROCESSOR, PassesOver), max_epochs, reader.wake)
            stack.callback(passes.close)
        if ranks.is_first and self.config.stop_at_success is not None and self.has_servers:
            results = context.streams.reader(EVALUATION_TOPIC, ACTOR, EvaluationResult)
            target = TargetReached(results, self.config.stop_at_success, reader.wake)
            stack.callback(target.close)
        timeout_s = config.supervise.progress_timeout_s
        self.feed = DataFeed(reader, self.heartbeat, timeout_s, ranks, self.stop, self.weights, passes, target)
        self.best = self._best_keeper(stack)

    def run(self) -> TrainerState:
        """Train to the last step; returns when the final weights are delivered and saved.

        When asked to stop, it saves a training state after the current step and returns.
        """
        self._begin()
        self._saved_at = monotonic()
        saved_step, is_first_update = self.state.step, True
        while not self._is_complete():
            start = perf_counter()
            batch = self.feed.next(self.state.step + 1, self._serve_fresh)
            if batch is None and self.feed.is_over:
                if not self._deliver_rest():
                    return self._stop(saved_step)
                break
            # `agreed` also waits for the other ranks.
            if batch is None or self.stop.agreed():
                return self._stop(saved_step)
            fetched = perf_counter()
            if not self.pauses.before_training(self.state.step):
                return self._stop(saved_step)
            switched = perf_counter()
            result = self._train(batch)
            trained = perf_counter()
            is_last, is_stopped = self._is_complete(), False
            update_starts = trained
            if update_is_due(self.context.config, self.state.step, is_last):
                is_stopped = not self.pauses.before_update(self.state.step)
                update_starts = perf_counter()
                if is_stopped:
                    logger.info("asked to stop while rollouts were ending: version %d is not sent", self.state.step)
                else:
                    is_probed = is_first_update or is_last or probe_is_due(self.context.config, self.state.step)
                    self._deliver(batch_tokens(batch.samples) if is_probed else [], is_last)
                    is_first_update = False
            delivered = perf_counter()
            switch_s = switched - fetched + update_starts - trained
            times = StepTimes(
                fetched - start, switch_s, trained - switched, delivered - update_starts, delivered - start
            )
            self._report(batch, result, times)
            if is_stopped:
                return self._stop(saved_step)
            if not is_last and self._keep():
                saved_step = self.state.step
            self.heartbeat.progress()
        exported = self._save(with_training_state=self.config.save_final_training_state)
        if self.best:
            self.best.offer_final(self.state.step, exported)
        if self.reporter:
            self.reporter.training_done(self.state)
        # Not saved: with more passes or a higher target a later start trains on.
        self.state = replace(self.state, is_over=self.feed.is_over)
        return self.state

    def _begin(self) -> None:
        if self.reporter:
            self.reporter.started(self.state)
        if self.best:
            self.best.begin(self.state.step)
        self._deliver(self.first_probe)
        if self.best:
            self.best.offer(self.state.step)

    def _train(self, batch: TrainingBatch) -> StepResult:
        result = self.steps.run(batch, self.state.entropy_control)
        if result.skipped:
            # Not the servers' fault: their numbers are checked on arrival. The step changed nothing.
            logger.warning("step %d: the gradient is not finite; the weights stay as they are", batch.step)
        elif self.weights is not None and samples_everything(self.context.config.llm.parameters):
            check_on_policy(result.metrics, batch.step)
        self.state = self.state.after(batch, self.feed.offset, result.entropy_control)
        return result

    def _keep(self) -> bool:
        """Save what is due after a step that is not the last; returns whether its training state was saved."""
        step = self.state.step
        is_saved = step % self.config.save_checkpoint_steps == 0 or step in self.config.also_save_steps
        is_saved = is_saved or self._minutes_are_over()
        exported = self._save() if is_saved else None
        if self.best and update_is_due(self.context.config, step):
            self.best.offer(step, exported)
        return is_saved

    def _minutes_are_over(self) -> bool:
        """Whether the last checkpoint is `save_checkpoint_minutes` old on rank 0."""
        minutes = self.config.save_checkpoint_minutes
        if minutes is None:
            return False
        return bool(self.ranks.broadcast(int(monotonic() - self._saved_at >= 60 * minutes)))

    def _step_ending(self, step: int) -> None:
        if self.reporter and self.weights is not None and update_is_due(self.context.config, step):
            self.reporter.step_ending(step)

    def _deliver_rest(self) -> bool:
        """No batch follows: send weights that were not sent yet. False: asked to stop meanwhile."""
        step = self.state.step
        logger.info("the passes or the success rate that end training are reached: step %d was the last one", step)
        if not self.context.config.sends_weights or update_is_due(self.context.config, step):
            return True
        if not self.pauses.before_update(step):
            return False
        self._deliver(self.first_probe, is_last=True)
        return True

    def _stop(self, saved_step: int) -> TrainerState:
        if self.state.step > saved_step:
            self._save_state()
        logger.info("stopped on request after step %d; its training state is saved", self.state.step)
        return self.state

    @property
    def _delivery_deadline_s(self) -> float:
        return 3 * self.context.config.supervise.weight_sync_timeout_s

    def _deliver(self, probe_tokens: list[list[int]], is_last: bool = False) -> None:
        if self.weights is None:
            return
        # Some server must get the final weights: wait for one that is restarting.
        deadline_s = self._delivery_deadline_s + (self.weights.return_timeout_s if is_last else 0.0)
        with self.heartbeat.waiting("servers to load the weights", deadline_s=deadline_s):
            delivery = self.weights.send(self.state.step, probe_tokens, required=is_last)
        if self.reporter:
            self.reporter.weights_delivered(delivery)

    def _serve_fresh(self, version: int) -> None:
        """Update a server that joined or came back while there is nothing to train on."""
        if self.weights is not None:
            with self.heartbeat.waiting("a server to load the weights", deadline_s=self._delivery_deadline_s):
                self.weights.send_to_fresh(version)

    def _report(self, batch: TrainingBatch, result: StepResult, times: StepTimes) -> None:
        if self.ratios:
            self.ratios.write(batch.step, batch.samples)
        if self.reporter is None:
            return
        values = step_metrics(batch, result.metrics, result.grad_norm, result.learning_rate, times)
        self.reporter.step_done(batch, self.state, times.wait_data_s)
        if (compiled := self.backend.policy.has_compiled_layers) is not None:
            #: 1: the decoder layers are compiled; 0: their trial failed
            values["finetune/compiled_layers"] = float(compiled)
        self.reporter.metrics.log(self.state.step, values | peak_memory(self.ranks.device))
        logger.info(
            "step %d: loss %.4g, reward %.3f, ess %.3f, grad norm %.3g, lag %.2f, %d samples in %.2f s (waited %.2f s)",
            self.state.step,
            values["finetune/loss"],
            values["finetune/reward_mean"],
            values.get("finetune/ess", 0.0),
            values["finetune/grad_norm"],
            values["finetune/lag_mean_versions"],
            len(batch.samples),
            values["finetune/step_s"],
            values["finetune/wait_data_s"],
        )

    def _is_complete(self) -> bool:
        return self.state.is_complete(self.config, self.update_interval)

    def _save(self, with_training_state: bool = True) -> Path:
        """Save model and training state; returns the folder of the model."""
        folder = self.exporter.export(self.state.step, self.backend.policy, self.backend.export_source())
        if with_training_state:
            self._save_state()
        self._saved_at = monotonic()
        return folder

    def _open_batches(self, stack: ExitStack) -> StreamReader[TrainingBatch]:
        """The batches after those that the state holds; those of another run with `debug.streams_from`."""
        recorded = recorded_streams(self.context.config)
        reader = (recorded or self.context.streams).reader(
            TRAINING_DATA_TOPIC,
            PREPROCESSOR,
            TrainingBatch,
            offset=self.state.data_offset,
            # All ranks take the same steps, and the records of another run stay as they are.
            consumer=TRAINER_CONSUMER if self.ranks.is_first and recorded is None else None,
        )
        stack.callback(reader.close)
        return reader

    def _open_reporter(self, stack: ExitStack) -> Reporter:
        name, streams = self.context.job.name, self.context.streams
        messages = streams.writer(TRAINER_TOPIC, name, TrainerMessage)
        fates = streams.writer(FATES_TOPIC, name, FateRecord)
        metrics = MetricRecorder(streams.writer(METRICS_TOPIC, name, MetricRecord), name)
        for writer in (messages, fates, metrics):
            stack.callback(writer.close)
        return Reporter(messages, fates, metrics, self.context.incarnation)

    def _open_ratios(self, stack: ExitStack) -> RatioRecorder | None:
        """None if not requested, if the stream cannot be opened, or if records would not be kept on disk."""
        streams = self.context.config.streams
        is_kept = backend_of(streams).is_on_disk and streams.retention == "all"
        if not self.config.record_token_ratios or not is_kept:
            return None
        try:
            writer = self.context.streams.writer(TOKEN_RATIOS_TOPIC, self.context.job.name, TokenRatios)
        except StreamError as error:
            logger.warning("importance ratios of tokens are not recorded: %s", error)
            return None
        recorder = RatioRecorder(writer, self.context.incarnation)
        stack.callback(recorder.close)
        return recorder

    def _best_keeper(self, stack: ExitStack) -> BestKeeper | None:
        """Keeps the best model by evaluation; None if not requested, or if no new version is ever evaluated."""
        context = self.context
        best = best_model_of(context.config, context.run_dir)
        if best is None or not self.has_servers or not context.config.sends_weights:
            return None
        results = None
        if self.ranks.is_first:
            results = context.streams.reader(EVALUATION_TOPIC, ACTOR, EvaluationResult)
            stack.callback(results.close)
        schedule = EvaluationSchedule(context.config.eval_every_n_versions, self.config.last_step)
        return BestKeeper(self.ranks, schedule, self.backend, self.exporter, best, results, context.incarnation)

    def _save_state(self) -> None:
        before = self.checkpoints.save(self.state, self.backend)
        if before is not None:
            self.context.streams.commit(TRAINING_DATA_TOPIC, PREPROCESSOR, before.data_offset)
            self.context.streams.commit(ACTOR_TOPIC, ACTOR, before.actor_offset)


def samples_everything(parameters: LLMParameters) -> bool:
    """Whether servers sample from the whole distribution, as the trainer's log-probs assume.

    `min_tokens` masks the end tokens: where the model would end its answer, the log-probs differ by far more than
    rounding, without any fault.
    """
    return parameters.min_tokens == 0


def check_on_policy(metrics: Mapping[str, float], step: int) -> None:
    """Compare trainer and servers on tokens that the weights in training sampled.

    The probe sends one sequence at a time. A server that is right then but wrong under load (kernels or CUDA graphs
    that fail for large batches) is detected here, at the next step. `metrics` are the same on all ranks.

    Raises:
        WeightSyncError: the mean gap is larger than rounding explains.
    """
    tokens, difference = metrics.get(ON_POLICY_TOKENS, 0.0), metrics.get(ON_POLICY_DIFF, 0.0)
    # NaN must fail.
    if tokens < MIN_ON_POLICY_TOKENS or difference <= MAX_ON_POLICY_DIFF:
        return
    raise WeightSyncError(
        "actor servers",
        f"at step {step} their log-probs of {tokens:.0f} tokens sampled from the weights in training differ by "
        f"{difference:.3g} nats on average from the trainer's, expected at most {MAX_ON_POLICY_DIFF:g}: a server is "
        "wrong under load although the probe passed, or rollouts sample with other parameters than llm.parameters. "
        "Set vllm_config.vllm_kwargs.enforce-eager='' to rule out CUDA graphs and compilation",
    )
