"""What a server adds to vLLM's engine: cached blocks never outlive their weights, and an update is one call.

Prefix-cache entries are found by a hash of the tokens and a salt. The salt is set here, when a request is about to be
scheduled, and names the epoch of the weights: a request that was queued before an update and starts after it gets the
new epoch, so it cannot hit blocks of the old weights. The epoch counts resumes (weights change only while the
scheduler is paused), so a version number that is used twice does no harm.

In an update the engine pauses, receives, loads and resumes by itself. vLLM has a route for each of these steps. A busy
server answers each one late, because its API process has other work and the engine reads calls only between model
steps, and no token is sampled meanwhile.

vLLM calls `create_scheduler` (`--scheduler-cls`) and mixes `WeightUpdateExtension` into its worker class
(`--worker-extension-cls`). Importing this module registers our transfer engine, before the worker creates it, and what
a server with a sent adapter needs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from pipelinerl.inference.adapter import adapter_request, load_what_was_sent
from pipelinerl.inference.arguments import ENGINE_NAME, serves_adapter
from pipelinerl.inference.auth import App, Receive, Scope, Send
from pipelinerl.inference.fast_output import (
    DEFAULT_HELD_TOKENS,
    HELD_TOKENS_VARIABLE,
    OutputHold,
    cheap_to_cut,
    read_body,
    send_error,
    send_json,
)
from pipelinerl.inference.transfer import PackedTransferEngine, checkpoint_tensors, is_tied
from pipelinerl.weights.link import UPDATE_PATH
from pipelinerl.weights.manifest import ServerModel, folder_checksum, local_folder

# Below the name of vLLM, whose configuration of logging is the one that the engine's processes have.
logger = init_logger(f"vllm.{__name__}")
Seconds = dict[str, float]
_EPOCH = re.compile(r"^weights-epoch-\d+:")
_READS_ALL = "pipelinerl_reads_every_answer"
_UPDATE_METHOD = "pipelinerl_update"

if ENGINE_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(ENGINE_NAME, PackedTransferEngine)
if serves_adapter(os.environ):
    load_what_was_sent(WorkerLoRAManager)


def create_scheduler(**kwargs: Any) -> Scheduler:
    """What vLLM calls as `--scheduler-cls`: the class depends on the engine's mode, as in vLLM itself.

    It is also where code of ours runs in the engine's process before the first update.
    """
    read_every_answer(MultiprocExecutor)
    setattr(EngineCore, _UPDATE_METHOD, update)
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    scheduler = (EpochAsyncScheduler if is_async else EpochScheduler)(**kwargs)
    if serves_adapter(os.environ):
        scheduler.adapter = adapter_request()
    return scheduler


def salt_for_epoch(salt: str | None, epoch: int) -> str:
    """`salt` with the epoch of the weights put in front, in place of an earlier epoch."""
    own = _EPOCH.sub("", salt or "", count=1)
    return f"weights-epoch-{epoch}:{own}"


class EpochSaltMixin:
    """Salts requests when they are queued, and again if the weights may have changed before they were scheduled."""

    #: What every request uses where the base model is frozen (see `inference.adapter`).
    adapter: Any = None
    _weights_epoch: int = 0

    def add_request(self, request: Request) -> None:
        if self.adapter is not None:
            request.lora_request = self.adapter
        self._salt(request)
        super().add_request(request)  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        # Its blocks are gone and it starts over; what it finds now must be of today's weights.
        self._salt(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        was_paused = self.pause_state != PauseState.UNPAUSED  # type: ignore[attr-defined]
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if was_paused and pause_state == PauseState.UNPAUSED:
            self._weights_epoch += 1
            for request in self.waiting:  # type: ignore[attr-defined]
                if request.num_computed_tokens == 0:
                    self._salt(request)

    def _salt(self, request: Request) -> None:
        """Give the request the salt of the current epoch and hash its tokens anew."""
        request.cache_salt = salt_for_epoch(request.cache_salt, self._weights_epoch)
        if request.block_hashes:
            request.block_hashes.clear()
            request.update_block_hashes()


class EpochScheduler(EpochSaltMixin, Scheduler):
    """For engines without asynchronous scheduling."""


class EpochAsyncScheduler(EpochSaltMixin, AsyncScheduler):
    """For engines with asynchronous scheduling. Tokens leave in batches (see `fast_output`).

    While requests run, a step is always in flight, so a pause ends only after one more call of `update_from_output`:
    there everything that is held goes out, under the label of the weights that sampled it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        held_tokens = int(os.environ.get(HELD_TOKENS_VARIABLE, DEFAULT_HELD_TOKENS))
        self._hold = OutputHold(held_tokens) if held_tokens > 1 else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._hold is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = cheap_to_cut(model_runner_output.logprobs)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            batch.outputs = self._hold.pass_on(batch.outputs, self.requests)
        if self.pause_state != PauseState.UNPAUSED:
            self._ship(outputs, self._hold.release())
        return outputs

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED and self._hold is not None and (late := self._hold.void_logprobs()):
            # The label of their weights is gone. Without log-probs they are refused as samples, not trained wrongly.
            logger.error("%d requests held tokens across a pause; their samples are discarded", late)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        ended = super().finish_requests(*args, **kwargs)
        if self._hold is not None:
            self._hold.forget(request.request_id for request in ended)
        return ended

    def _ship(self, outputs: dict[int, EngineCoreOutputs], released: list[EngineCoreOutput]) -> None:
        for output in released:
            request = self.requests.get(output.request_id)
            if request is not None:
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


def update(
    engine: Any, update_info: Mapping[str, Any], version: str, clears_cache: bool, resumes: bool
) -> Seconds | Future[Seconds]:
    """Update the engine's workers between two steps of the model.

    If anything fails the engine stays paused, because half-loaded weights must not sample.

    Args:
        engine: vLLM's `EngineCore`.
        update_info: what the workers are about to receive (`weights.buffers.update_info_of`).
        version: label of the new weights.
        clears_cache: clear the caches, so that running requests recompute theirs with the new weights.
        resumes: whether to resume afterwards.

    Returns:
        Seconds by phase (`weights.sync.PHASES`), or a future of them if the steps in progress have to end first.
    """
    started = time.monotonic()
    # A call that its sender gave up must not wait for buffers that a later one is sent.
    number = engine.pipelinerl_updates = getattr(engine, "pipelinerl_updates", 0) + 1
    paused = engine.pause_scheduler(mode="keep", clear_cache=clears_cache)

    def apply() -> Seconds:
        if engine.pipelinerl_updates != number:
            raise RuntimeError("another update was requested before this one began")
        seconds, begun = {"pause": time.monotonic() - started}, time.monotonic()
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
        seconds["transfer"], begun = time.monotonic() - begun, time.monotonic()
        engine.collective_rpc("finish_weight_update")
        if serves_adapter(os.environ):
            # vLLM would load it at the next step, where an error ends the engine.
            engine.collective_rpc("pipelinerl_load_adapter")
        engine.set_weight_version(version)
        seconds["load"], begun = time.monotonic() - begun, time.monotonic()
        if resumes:
            engine.resume_scheduler()
        seconds["resume"] = time.monotonic() - begun
        return seconds

    if paused is None:
        return apply()
    outcome: Future[Seconds] = Future()
    paused.add_done_callback(functools.partial(_settle, engine, outcome, apply))
    return outcome


def _settle(engine: Any, outcome: Future[Seconds], apply: Callable[[], Seconds], paused: Future[None]) -> None:
    """Runs in the engine's loop when it has no work left and is about to wait for the next call."""
    try:
        paused.result()
        outcome.set_result(apply())
    except Exception as error:  # noqa: BLE001 - the answer to the call; here it would end the engine
        outcome.set_exception(error)
    # The loop now has work, but would not check again before it waits.
    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


class UpdateRoute:
    """`POST` of `weights.link.UPDATE_PATH`; everything else is handed on."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != UPDATE_PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            content = await read_body(receive)
        except ConnectionError:
            return
        client = scope["app"].state.engine_client
        try:
            body = json.loads(content)
            clears_cache = body["kv_cache"] == "recompute"
            if clears_cache:
                await client.renderer.clear_mm_cache_async()
            # Data-parallel engines wait for each other to resume, so none may resume before all are updated.
            are_several = client.vllm_config.parallel_config.data_parallel_size > 1
            what = (body["update_info"], body["weight_version"], clears_cache, body["resumes"] and not are_several)
            seconds = await client.engine_core.call_utility_async(_UPDATE_METHOD, *what)
            if body["resumes"] and are_several:
                started = time.monotonic()
                await client.resume_generation()
                seconds["resume"] += time.monotonic() - started
        except Exception as error:  # whatever it is, the trainer has to know
            logger.exception("a weight update failed")
            await send_error(send, f"{type(error).__name__}: {error}")
            return
        await send_json(send, 200, {"seconds": seconds})


def narrow_tensors(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Names of the tensors of `model` that have fewer bits than `dtype`: vLLM rounds what it loads without a word."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, each in tensors if each.is_floating_point() and each.dtype.itemsize < dtype.itemsize]


class WeightUpdateExtension:
    """Methods of the worker; `self` is vLLM's worker. Names are prefixed so that none of vLLM's is hidden."""

    vllm_config: Any
    weight_transfer_engine: Any
    get_model: Callable[[], torch.nn.Module]
    _weight_update_active: bool

    def pipelinerl_abort_update(self) -> dict[str, bool]:
        """Forget an update that failed or was cut short, and leave the trainer's group.

        vLLM's own shutdown of the engine refuses while an update is open, which is just when it is needed.
        """
        was_open = bool(self._weight_update_active)
        self._weight_update_active = False
        self.weight_transfer_engine.abort()
        return {"was_open": was_open}

    def pipelinerl_load_adapter(self) -> None:
        """Load the adapter that was sent. vLLM would do it at the next step, where an error ends the engine."""
        worker: Any = self
        worker.add_lora(adapter_request())

    def pipelinerl_model_info(self) -> dict[str, Any]:
        """What an update has to cover: the fields of `ServerModel`."""
        config = self.vllm_config.model_config
        adapter = serves_adapter(os.environ)
        model = ServerModel(
            tensors=checkpoint_tensors(config),
            tied=is_tied(config),
            dtype=str(config.dtype).removeprefix("torch."),
            adapter_rank=self.vllm_config.lora_config.max_lora_rank if adapter else None,
            rounded=[] if config.quantization else narrow_tensors(self.get_model(), config.dtype),
            base_checksum=folder_checksum(local_folder(config.model, config.revision)) if adapter else None,
        )
        answer: dict[str, Any] = msgspec.to_builtins(model)
        return answer


def read_every_answer(executor_class: Any) -> None:
    """Change `collective_rpc` of vLLM's executor class: every worker's answer is read, whichever failed.

    vLLM's executor for several worker processes stops reading at the first failed answer. Those of the later workers
    stay in their queues, and from then on each of these workers answers every call with the answer to the call before:
    after one failed update no further one succeeds. Here a failure comes back as a value, and is raised when all
    answered. A second call changes nothing.

    Calls that do not wait, and those that one worker answers, are those of the running model: their failure ends the
    engine. They stay as they are, and so do calls of functions and calls with a timeout.
    """
    call_all = executor_class.collective_rpc
    if getattr(call_all, _READS_ALL, False):
        return

    @functools.wraps(call_all)
    def collective_rpc(
        self: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **others: Any,
    ) -> Any:
        special = non_block or unique_reply_rank is not None or any(value is not None for value in others.values())
        # Functions travel in a way of their own, and a timeout of vLLM's stops reading as well.
        if special or timeout is not None or not isinstance(method, str):
            return call_all(self, method, timeout, args, kwargs, non_block, unique_reply_rank, **others)
        return values_of(call_all(self, guarded, None, (method, args, kwargs or {})))

    setattr(collective_rpc, _READS_ALL, True)
    executor_class.collective_rpc = collective_rpc


def guarded(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """What a worker does when it is called: whether that went well, and its result or what was raised, as text."""
    try:
        return True, getattr(worker, method)(*args, **kwargs)
    except Exception as error:
        logger.exception("%s failed", method)
        return False, str(error) or type(error).__name__


def values_of(answers: Sequence[tuple[bool, Any]]) -> list[Any]:
    """The results of all workers in the order of their ranks.

    Raises:
        RuntimeError: at least one failed; with every different error (one may be the consequence of another), in vLLM's
            words.
    """
    failures = [(rank, value) for rank, (is_well, value) in enumerate(answers) if not is_well]
    if failures:
        ranks: dict[Any, list[str]] = {}
        for rank, error in failures:
            ranks.setdefault(error, []).append(str(rank))
        if len(answers) == 1:
            what = f"'{failures[0][1]}'"
        else:
            what = "; ".join(f"'{error}' (worker {', '.join(those)})" for error, those in ranks.items())
            what += f"; {len(failures)} of {len(answers)} workers failed"
        raise RuntimeError(f"Worker failed with error {what}, please check the stack trace above for the root cause")
    return [value for _, value in answers]
