"""Start vLLM's OpenAI server in this process with everything that weight updates need. Called by `main`.

Blocks until the server ends. vLLM is imported only after the environment is set: it reads some variables at import.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import logging
import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from pipelinerl.errors import ConfigError
from pipelinerl.inference.arguments import (
    ADAPTER_VARIABLE,
    AdapterRoom,
    ServerSettings,
    check_options,
    layers_of,
    server_arguments,
)
from pipelinerl.inference.auth import read_token
from pipelinerl.weights.manifest import local_folder, read_manifest

logger = logging.getLogger(__name__)

#: Longest wait for open requests when the server ends. After the death of a worker some never end by themselves.
_GRACE_S = 5


def prepare_environment(environ: MutableMapping[str, str], settings: ServerSettings, cpu_kv_cache_gib: float) -> None:
    """Set the variables that vLLM and our scheduler read. Those that a user may want to choose keep their value."""
    # Opens the control routes (pause, weight transfer); our token guards them.
    environ["VLLM_SERVER_DEV_MODE"] = "1"
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.pop(ADAPTER_VARIABLE, None)
    if settings.adapter is not None:
        environ[ADAPTER_VARIABLE] = "1"
    if settings.on_cpu:
        # vLLM takes whole GiB only.
        environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, math.ceil(cpu_kv_cache_gib))))
        # Pinned threads of several servers and the trainer would share one core of a small machine.
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if _is_eager(settings.vllm_kwargs):
            # Even then vLLM compiles the ranking of log-probs at the first request, which takes 10-20 s of two cores.
            environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        return
    if importlib.util.find_spec("flashinfer") is None:
        environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if check_options(settings.vllm_kwargs)[0].get("dtype", settings.dtype) in ("float32", "float"):
        # vLLM's attention is a Triton kernel then, and Triton multiplies fp32 values in TF32 unless it is told.
        environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def serve(settings: ServerSettings, cpu_kv_cache_gib: float = 1.0) -> None:
    """Run the server until it is stopped by a signal.

    Raises:
        ConfigError: an option cannot be used, or no token is set.
    """
    if settings.adapter is not None:
        settings = replace(settings, adapter=room_in(settings.adapter, settings.model))
    argv, notes = server_arguments(settings)
    for note in notes:
        logger.warning(note)
    try:
        read_token(os.environ)
    except ValueError as error:
        raise ConfigError("PIPELINERL_SERVER_TOKEN", "<hidden>", "a secret", str(error)) from error
    if not _is_loopback(settings.host):
        logger.warning("listening on %s, beyond this machine: the token is sent in clear text", settings.host)
    prepare_environment(os.environ, settings, cpu_kv_cache_gib)
    _run_vllm(argv)


def room_in(room: AdapterRoom, model: str) -> AdapterRoom:
    """`room` with the layers of the model named, if it says that all of them may have an adapter.

    vLLM would wrap the embedding and the output head too, and compute with their zeros at every step.
    """
    folder = None if room.layers else local_folder(model)
    tensors = None if folder is None else read_manifest(folder)
    return room if tensors is None else replace(room, layers=layers_of(tensors))


def parser_of_vllm() -> argparse.ArgumentParser:
    """Of vLLM's command line, without shortened names: one would pass the checks of `arguments` and then mean an option
    that they refuse."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    bare = FlexibleArgumentParser(prog="pipelinerl.inference.main", allow_abbrev=False)  # type: ignore[no-untyped-call]
    parser: argparse.ArgumentParser = make_arg_parser(bare)  # type: ignore[no-untyped-call]
    return parser


def option_names() -> set[str]:
    """The options of the installed vLLM, without dashes in front and without the `no-` forms of flags."""
    texts = {text.removeprefix("--") for action in parser_of_vllm()._actions for text in action.option_strings}
    return {name for name in texts if name[0] != "-" and (not name.startswith("no-") or name[3:] not in texts)}


def _run_vllm(argv: list[str]) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()  # type: ignore[no-untyped-call]
    pause_without_sleep()
    args = parser_of_vllm().parse_args(argv)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args, timeout_graceful_shutdown=_GRACE_S))


def pause_without_sleep() -> None:
    """Replace vLLM's pause, which sleeps 20 ms so that outputs on their way are returned first.

    Updates need no such order: the version of a token is set in the engine.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    async def pause_generation(self: AsyncLLM, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if clear_cache:
            await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    AsyncLLM.pause_generation = pause_generation  # type: ignore[assignment, method-assign]


def _is_eager(kwargs: Mapping[str, object]) -> bool:
    return any(name.replace("_", "-") == "enforce-eager" and value is not False for name, value in kwargs.items())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
