"""Builds the parts of one rank's training loop from the context of its process. Called by the entry point.

Waits for the other ranks (process group) and, on rank 0, for the servers to come up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from pipelinerl.config.schedule import EvaluationSchedule, update_interval
from pipelinerl.finetune.backends.base import Backend, create_backend
from pipelinerl.finetune.best_model import best_model_of
from pipelinerl.finetune.checkpoint import CheckpointStore
from pipelinerl.finetune.data_feed import DataFeed
from pipelinerl.finetune.device_memory import peak_memory
from pipelinerl.finetune.keep_best import BestKeeper
from pipelinerl.finetune.loop import TrainingLoop
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.on_policy_check import samples_everything
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.passes_over import follow_passes
from pipelinerl.finetune.pauses import open_pauses, wait_for_servers
from pipelinerl.finetune.pool_setup import open_pool
from pipelinerl.finetune.probe_tokens import text_tokens
from pipelinerl.finetune.ranks import Ranks, joined_ranks
from pipelinerl.finetune.reference import ReferenceModel, load_reference
from pipelinerl.finetune.report import Reporter
from pipelinerl.finetune.state import TrainerState
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.stop_request import StopRequest, stop_on_sigterm
from pipelinerl.finetune.weights_feed import WeightsFeed
from pipelinerl.llm.tokens import load_tokenizer
from pipelinerl.records import EvaluationResult, FateRecord, MetricRecord, TrainerMessage, TrainingBatch
from pipelinerl.role import RoleContext
from pipelinerl.run.recorded_streams import recorded_streams
from pipelinerl.streams.base import (
    ACTOR_TOPIC,
    EVALUATION_TOPIC,
    FATES_TOPIC,
    METRICS_TOPIC,
    TRAINER_CONSUMER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
    StreamReader,
)
from pipelinerl.tracking.recorder import MetricRecorder

logger = logging.getLogger(__name__)

PREPROCESSOR = "preprocessor_0"
ACTOR = "actor_0"


def run_trainer(context: RoleContext, environ: Mapping[str, str]) -> TrainerState:
    """Build everything, train to the end (or until SIGTERM), and take everything down again."""
    config = context.config
    if context.world.device == "cpu":
        torch.set_num_threads(max(context.job.cores, 1))
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        if context.world.device == "cuda" and config.world.placement == "colocated":
            wait_for_servers(context)
        # Rank 0 waits for data, the others for rank 0: it reports first.
        timeout_s = config.supervise.progress_timeout_s + 60
        meeting = meeting_file(context)
        ranks = stack.enter_context(joined_ranks(environ, context.world.device, timeout_s, meeting))
        policy = load_policy(config, ranks.device)
        # Before the backend: it may shard or wrap the policy.
        reference = load_reference(
            config, policy, ranks.device, has_servers=bool(context.world.jobs_of("preprocessor_llm"))
        )
        backend = create_backend(policy, config, ranks)
        checkpoints = checkpoint_store(context, ranks)
        restored = checkpoints.restore(backend) or TrainerState()
        state = msgspec.structs.replace(restored, incarnation=context.incarnation)
        loop = build_loop(context, ranks, backend, checkpoints, state, stack, reference)
        return loop.run(state)


def build_loop(
    context: RoleContext,
    ranks: Ranks,
    backend: Backend,
    checkpoints: CheckpointStore,
    state: TrainerState,
    stack: ExitStack,
    reference: ReferenceModel | None = None,
) -> TrainingLoop:
    """The loop of this rank, reading from where `state` stopped. `stack` closes what was opened."""
    config, finetune = context.config, context.config.finetune
    dtype = backend.policy.compute_dtype
    tokenizer = load_tokenizer(config.model_path, trust_remote_code=finetune.trust_remote_code)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    reader = _open_batches(context, ranks, state, stack)
    has_servers = bool(context.world.jobs_of("actor_llm"))
    stop = StopRequest(ranks)
    reporter = None
    publisher = None
    pool = None
    if ranks.is_first:
        reporter = _open_reporter(context, stack)
        if has_servers:
            publisher, pool = open_pool(context, stack, reader.wake)
    pauses, pause = open_pauses(context, ranks, backend, publisher, stop, stack)

    def wake() -> None:
        reader.wake()
        if pause is not None:
            pause.wake()

    stack.enter_context(stop_on_sigterm(stop, wake))
    first_tokens = text_tokens(tokenizer, backend.policy.language_model.config.get_text_config().vocab_size)
    weights = None
    if has_servers:
        start_timeout_s = config.vllm_config.start_timeout_s
        sent = backend.policy.served_dtype
        only_adapter = backend.policy.sends_adapter
        weights = WeightsFeed(backend, ranks, publisher, sent, pool, first_tokens, start_timeout_s, only_adapter)
    exporter = ModelExporter(
        context.run_dir.finetune,
        config.model_path,
        ranks,
        finetune.keep_intermediate_checkpoints,
        frozenset(finetune.also_save_steps),
        trust_remote_code=finetune.trust_remote_code,
    )
    return TrainingLoop(
        config=finetune.model_copy(update={"weight_update_interval": update_interval(config)}),
        backend=backend,
        feed=DataFeed(
            reader,
            context.heartbeat,
            config.supervise.progress_timeout_s,
            lambda: stop.requested,
            ranks,
            lambda: weights is not None and weights.has_fresh,
            follow_passes(context, PREPROCESSOR, stack, reader.wake) if ranks.is_first else lambda step: False,
        ),
        steps=StepRunner(
            backend, finetune, ranks, schedule_of(finetune), pad_id, reference, context.heartbeat.progress
        ),
        weights=weights,
        checkpoints=checkpoints,
        exporter=exporter,
        reporter=reporter,
        heartbeat=context.heartbeat,
        export_dtype=dtype,
        first_probe_tokens=first_tokens,
        delivery_deadline_s=3 * config.supervise.weight_sync_timeout_s,
        stop=stop,
        pauses=pauses,
        best=best_keeper(context, ranks, exporter, stack) if has_servers else None,
        updates_servers=finetune.send_weight_updates,
        probe_every_n_updates=config.supervise.probe_every_n_updates,
        checks_sampling=samples_everything(config.llm.parameters),
        device_metrics=lambda: peak_memory(ranks.device),
    )


def _open_batches(
    context: RoleContext, ranks: Ranks, state: TrainerState, stack: ExitStack
) -> StreamReader[TrainingBatch]:
    """The stream of batches behind those that `state` holds; of another run with `debug.streams_from`."""
    recorded = recorded_streams(context.config)
    reader = (recorded or context.streams).reader(
        TRAINING_DATA_TOPIC,
        PREPROCESSOR,
        TrainingBatch,
        offset=state.data_offset,
        # All ranks take the same steps, and the records of another run stay as they are.
        consumer=TRAINER_CONSUMER if ranks.is_first and recorded is None else None,
    )
    stack.callback(reader.close)
    return reader


def _open_reporter(context: RoleContext, stack: ExitStack) -> Reporter:
    name, streams = context.job.name, context.streams
    messages = streams.writer(TRAINER_TOPIC, name, TrainerMessage)
    fates = streams.writer(FATES_TOPIC, name, FateRecord)
    metrics = MetricRecorder(streams.writer(METRICS_TOPIC, name, MetricRecord), name)
    for writer in (messages, fates, metrics):
        stack.callback(writer.close)
    return Reporter(messages, fates, metrics, context.incarnation)


def best_keeper(context: RoleContext, ranks: Ranks, exporter: ModelExporter, stack: ExitStack) -> BestKeeper | None:
    """What keeps the best model by evaluation; None: nobody asked for it, or nothing new is ever evaluated."""
    config = context.config
    best = best_model_of(config, context.run_dir)
    if best is None or not config.finetune.send_weight_updates:
        return None
    results = None
    if ranks.is_first:
        results = context.streams.reader(EVALUATION_TOPIC, ACTOR, EvaluationResult)
        stack.callback(results.close)
    schedule = EvaluationSchedule(config.eval_every_n_versions, config.finetune.last_step)
    return BestKeeper(ranks, schedule, exporter, best, results, context.incarnation)


def meeting_file(context: RoleContext) -> Path | None:
    """Where the ranks of one machine meet in this start of the run; None if there are several machines."""
    if context.world.world_size > 1:
        return None
    return context.run_dir.finetune / f".ranks-{context.run_id}-{context.incarnation}"


def checkpoint_store(context: RoleContext, ranks: Ranks) -> CheckpointStore:
    finetune = context.config.finetune
    return CheckpointStore(
        context.run_dir.finetune / "training_state",
        ranks,
        finetune.keep_last_checkpoints,
        frozenset(finetune.also_save_steps),
        on_safe=lambda state: commit_streams(context, state),
    )


def commit_streams(context: RoleContext, state: TrainerState) -> None:
    """Tell the streams that no resume goes further back than `state`."""
    context.streams.commit(TRAINING_DATA_TOPIC, PREPROCESSOR, state.data_offset)
    context.streams.commit(ACTOR_TOPIC, ACTOR, state.actor_offset)
