"""The trainer's loop: fetch a batch, take a step, hand over the weights, report, save. Every rank runs it.

Called by the entry point, which builds the parts. Waits only inside its parts:

| part        | waits for                          | woken by                                |
|-------------|------------------------------------|-----------------------------------------|
| feed        | the next `TrainingBatch`           | the preprocessor's write to the stream  |
| steps       | the other ranks                    | their last backward                     |
| pauses      | running rollouts (not `pipeline`)  | the actor's answer on stream `turns`    |
| weights     | the servers                        | their answers, or the sync time-out     |
| checkpoints | the other ranks, the disk          | their shards                            |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.checkpoint import CheckpointStore
from pipelinerl.finetune.data_feed import DataFeed, Waiter
from pipelinerl.finetune.keep_best import BestKeeper
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.on_policy_check import check_on_policy
from pipelinerl.finetune.pauses import PausedUpdates
from pipelinerl.finetune.probe_tokens import batch_tokens
from pipelinerl.finetune.report import Reporter
from pipelinerl.finetune.state import TrainerState
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.step_metrics import StepTimes, step_metrics
from pipelinerl.finetune.stop_request import StopRequest
from pipelinerl.finetune.weights_feed import Delivery, WeightsFeed
from pipelinerl.records import TrainingBatch
from pipelinerl.weights.source import WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingLoop:
    """Everything one rank needs to train. `reporter` exists on rank 0 only; `weights` is None without servers."""

    config: FinetuneConfig
    backend: Backend
    feed: DataFeed
    steps: StepRunner
    weights: WeightsFeed | None
    checkpoints: CheckpointStore
    exporter: ModelExporter
    reporter: Reporter | None
    heartbeat: Waiter
    export_dtype: torch.dtype
    first_probe_tokens: list[list[int]]
    delivery_deadline_s: float | None = None
    stop: StopRequest | None = None
    pauses: PausedUpdates | None = None
    #: None: the best model by evaluation is not kept.
    best: BestKeeper | None = None
    #: False: the servers keep the weights that they got at the start.
    updates_servers: bool = True
    #: Probe every n-th update of the run; 0: only the first one behind a start, and the last.
    probe_every_n_updates: int = 0
    #: Whether on-policy tokens have to have the servers' log-probs (see `on_policy_check`).
    checks_sampling: bool = True
    #: Metrics of the device, read once a step.
    device_metrics: Callable[[], dict[str, float]] = dict
    clock: Callable[[], float] = time.perf_counter

    def run(self, state: TrainerState) -> TrainerState:
        """Train from `state` to the last step; returns when the final weights are delivered and saved.

        Asked to stop, it returns after the present step, with a training state saved.
        """
        self._begin(state)
        is_first_step = True
        saved_step, is_over = state.step, False
        while not self._is_complete(state):
            start = self.clock()
            batch = self.feed.next(state.step + 1, lambda step=state.step: self._serve_fresh(step))  # type: ignore[misc]
            if batch is None and self.feed.is_over:
                if not self._deliver_rest(state.step):
                    return self._stop(state, saved_step)
                is_over = True
                break
            # Waits for ranks that got their data later.
            if batch is None or (self.stop is not None and self.stop.agreed()):
                return self._stop(state, saved_step)
            fetched = self.clock()
            if not self._may_train(state.step):
                return self._stop(state, saved_step)
            turned = self.clock()
            result = self.steps.run(batch, state.entropy_control)
            # Numbers that are not finite are the trainer's own (servers' are never samples): that step changed nothing.
            if self.weights is not None and self.checks_sampling and not result.skipped:
                check_on_policy(result.metrics, batch.step)
            trained = self.clock()
            state = state.after(batch, self.feed.offset, result.entropy_control)
            is_last = self._is_complete(state)
            is_stopped = False
            drained = trained
            if self._update_is_due(state.step, is_last):
                probed = is_first_step or is_last or self._probe_is_due(state.step)
                is_stopped = not self._may_update(state.step)
                drained = self.clock()
                if is_stopped:
                    logger.info("asked to stop while rollouts ended: version %d is not sent", state.step)
                else:
                    self._deliver(state.step, batch_tokens(batch.samples) if probed else [], is_last)
                    is_first_step = False
            delivered = self.clock()
            if result.skipped:
                logger.warning("step %d: the gradient is not finite; the weights stay as they are", state.step)
            switch_s = turned - fetched + drained - trained
            times = StepTimes(fetched - start, switch_s, trained - turned, delivered - drained, delivered - start)
            values = step_metrics(batch, result.metrics, result.grad_norm, result.learning_rate, times)
            self._report(batch, state, values | self.device_metrics())
            if is_stopped:
                return self._stop(state, saved_step)
            if not is_last and self._keep(state):
                saved_step = state.step
            self.heartbeat.progress()
        exported = self._save(state, with_training_state=self.config.save_final_training_state)
        if self.best:
            self.best.offer_final(state.step, exported)
        if self.reporter:
            self.reporter.training_done(state)
        return replace(state, is_over=is_over)

    def _begin(self, state: TrainerState) -> None:
        if self.reporter:
            self.reporter.started(state)
        if self.best:
            self.best.begin(state.step)
        self._deliver(state.step, self.first_probe_tokens)
        if self.best:
            self.best.offer(state.step, self.backend.policy, self._exported_weights)

    def _keep(self, state: TrainerState) -> bool:
        """Save what is to stay of a step that is not the last one; returns whether its training state does."""
        is_saved = self._save_is_due(state.step)
        exported = self._save(state) if is_saved else None
        if self.best and self._update_is_due(state.step, is_last=False):
            self.best.offer(state.step, self.backend.policy, self._exported_weights, exported)
        return is_saved

    def _deliver_rest(self, step: int) -> bool:
        """Nothing follows behind `step`: send what is not sent yet. False: asked to stop meanwhile."""
        logger.info("the passes over the problems are over: step %d was the last one", step)
        if not self.updates_servers or step % self.config.weight_update_interval == 0:
            return True
        if not self._may_update(step):
            return False
        self._deliver(step, self.first_probe_tokens, is_last=True)
        return True

    def _stop(self, state: TrainerState, saved_step: int) -> TrainerState:
        if state.step > saved_step:
            self.checkpoints.save(state, self.backend)
        logger.info("stopped on request behind step %d; its training state is saved", state.step)
        return state

    def _may_train(self, steps_done: int) -> bool:
        return self.pauses is None or self.pauses.before_training(steps_done)

    def _may_update(self, version: int) -> bool:
        return self.pauses is None or self.pauses.before_update(version)

    def _deliver(self, version: int, probe_tokens: list[list[int]], is_last: bool = False) -> Delivery | None:
        if self.weights is None:
            return None
        deadline_s = self.delivery_deadline_s
        if is_last and deadline_s is not None:
            # Somebody has to have the final weights: a server that is just being started again is waited for.
            deadline_s += self.weights.return_timeout_s
        with self.heartbeat.waiting("servers to take the weights", deadline_s=deadline_s):
            delivery = self.weights.send(version, probe_tokens, required=is_last)
        if self.reporter:
            self.reporter.weights_delivered(delivery)
        return delivery

    def _serve_fresh(self, version: int) -> None:
        """Give a server that came (back) its weights while there is nothing to train on."""
        if self.weights is None:
            return
        with self.heartbeat.waiting("a server to take the weights", deadline_s=self.delivery_deadline_s):
            self.weights.send_to_fresh(version)

    def _report(self, batch: TrainingBatch, state: TrainerState, values: dict[str, float]) -> None:
        if self.reporter is None:
            return
        self.reporter.step_done(batch, state)
        self.reporter.metrics.log(state.step, values)
        if state.step % self.config.log_each_n_steps:
            return
        logger.info(
            "step %d: loss %.4g, reward %.3f, ess %.3f, grad norm %.3g, lag %.2f, %d samples in %.2f s (waited %.2f s)",
            state.step,
            values["finetune/loss"],
            values["finetune/reward_mean"],
            values.get("finetune/ess", 0.0),
            values["finetune/grad_norm"],
            values["finetune/lag_mean_versions"],
            len(batch.samples),
            values["finetune/step_s"],
            values["finetune/wait_data_s"],
        )

    def _is_complete(self, state: TrainerState) -> bool:
        return state.is_complete(self.config, self.config.weight_update_interval)

    def _update_is_due(self, step: int, is_last: bool) -> bool:
        return self.updates_servers and (step % self.config.weight_update_interval == 0 or is_last)

    def _probe_is_due(self, step: int) -> bool:
        """From the configuration and the step alone: all ranks agree, and a resumed run goes on in the same rhythm."""
        number = step // self.config.weight_update_interval
        return self.probe_every_n_updates > 0 and number % self.probe_every_n_updates == 0

    def _save_is_due(self, step: int) -> bool:
        return step % self.config.save_checkpoint_steps == 0 or step in self.config.also_save_steps

    def _save(self, state: TrainerState, with_training_state: bool = True) -> Path:
        """Save model and training state; returns the folder of the model."""
        folder = self.exporter.export(state.step, self.backend.policy, self._exported_weights())
        if with_training_state:
            self.checkpoints.save(state, self.backend)
        return folder

    def _exported_weights(self) -> WeightSource:
        return self.backend.weight_source(self.export_dtype, with_value_head=True)
