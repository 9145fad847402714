"""A weight update in a server: its route, its steps in the engine, and what the trainer can call in each worker.

An update is one call, and the engine pauses, receives, loads and resumes by itself. vLLM has a route for each of these
steps. A busy server answers each one late, because its API process has other work and the engine reads calls only
between model steps, and no token is sampled meanwhile.

vLLM mixes `WeightUpdateExtension` into its worker class (`--worker-extension-cls`). Importing this module registers our
transfer engine, before the worker creates it, and what a server with a sent adapter needs.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore

from pipelinerl.inference.adapter import adapter_request, load_what_was_sent
from pipelinerl.inference.arguments import ENGINE_NAME, serves_adapter
from pipelinerl.inference.auth import App, Receive, Scope, Send
from pipelinerl.inference.fast_output import read_body, send_error, send_json
from pipelinerl.inference.transfer import PackedTransferEngine, checkpoint_tensors, is_tied
from pipelinerl.weights.link import UPDATE_PATH
from pipelinerl.weights.manifest import ServerModel, folder_checksum, local_folder

logger = logging.getLogger(__name__)
_METHOD = "pipelinerl_update"
Seconds = dict[str, float]

if ENGINE_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(ENGINE_NAME, PackedTransferEngine)
if serves_adapter(os.environ):
    load_what_was_sent(WorkerLoRAManager)


def install() -> None:
    """Give vLLM's engine the method that the route calls. In the engine's process, before the first call."""
    setattr(EngineCore, _METHOD, update)


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
            seconds = await client.engine_core.call_utility_async(_METHOD, *what)
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
