"""Main of one vLLM server (job kinds `actor_llm` and `preprocessor_llm`).

In a run: `--run-dir DIR --job NAME`. On its own: `--model PATH --port N [--transport gloo] [--vllm-kwargs JSON]`, with
the token in `PIPELINERL_SERVER_TOKEN`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError, UserError
from pipelinerl.inference.arguments import (
    ADAPTER_VARIABLE,
    BINDING_KEY,
    UNBOUND,
    AdapterRoom,
    ServerSettings,
    check_options,
    foreign_variables,
    layers_of,
    server_arguments,
)
from pipelinerl.inference.auth import read_token
from pipelinerl.role import RoleContext, quick_imports, run_role
from pipelinerl.weights.link import is_loopback
from pipelinerl.weights.manifest import local_folder, read_manifest
from pipelinerl.world.jobs import CPU_TRANSPORT, TRANSPORTS, Job

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(word == "--run-dir" or word.startswith("--run-dir=") for word in arguments):
        return run_role(serve_job, arguments)
    return _main_standalone(arguments)


def serve_job(context: RoleContext) -> None:
    """Serve the model of a run as the world plan says."""
    serve(settings_of_job(context), context.config.vllm_config.cpu_kv_cache_gib)


def settings_of_job(context: RoleContext) -> ServerSettings:
    """Settings of this job's server from the run's configuration and world plan."""
    config, job = context.config, context.job
    if job.port is None:
        raise ValueError(f"{job.name}: got no port in the world plan, expected one for a server")
    on_cpu = context.world.device == "cpu"
    return ServerSettings(
        model=config.model_path,
        host=job.host,
        port=job.port,
        on_cpu=on_cpu,
        vllm_kwargs=config.vllm_config.vllm_kwargs if on_cpu else _with_memory(config, job),
        seed=config.seed + job.idx,
        dtype="float32" if on_cpu else None,
        fp32_head=config.fp32_lm_head,
        can_sleep=not on_cpu and config.world.placement == "colocated",
        trust_remote_code=config.finetune.trust_remote_code,
        # Servers of a reference model serve the frozen model alone.
        adapter=adapter_room(config.finetune.lora) if job.kind == "actor_llm" else None,
    )


def _with_memory(config: RunConfig, job: Job) -> Mapping[str, object]:
    """vLLM's options, with the memory that this server may use of its GPU."""
    planned: dict[str, object] = {"gpu-memory-utilization": job.memory_share or config.gpu_memory_share}
    if job.cache_bytes is not None:
        planned["kv-cache-memory-bytes"] = job.cache_bytes
    given = config.vllm_config.vllm_kwargs
    return {key: value for key, value in given.items() if key.lstrip("-").replace("_", "-") not in planned} | planned


def adapter_room(lora: LoraConfig) -> AdapterRoom | None:
    """What servers keep free for the adapter that updates bring; None if they bring whole models."""
    if not lora.enabled or lora.sync != "adapter":
        return None
    # A target may be written with a part of what is in front of it: self_attn.q_proj.
    return AdapterRoom(lora.r, tuple(name.rpartition(".")[2] for name in lora.target_modules))


def prepare_environment(environ: MutableMapping[str, str], settings: ServerSettings, cpu_kv_cache_gib: float) -> None:
    """Set the variables that vLLM and our scheduler read. Those that a user may want to choose keep their value; vLLM's
    others are dropped."""
    if foreign := foreign_variables(environ):
        logger.warning("dropped from the environment: %s", ", ".join(foreign))
    for name in foreign:
        del environ[name]
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
        environ.setdefault(BINDING_KEY, UNBOUND)
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
    settings = with_fp32_attention(settings)
    argv, notes = server_arguments(settings)
    for note in notes:
        logger.warning(note)
    try:
        read_token(os.environ)
    except ValueError as error:
        raise ConfigError("PIPELINERL_SERVER_TOKEN", "<hidden>", "a secret", str(error)) from error
    if not is_loopback(settings.host):
        logger.warning("listening on %s, beyond this machine: the token is sent in clear text", settings.host)
    prepare_environment(os.environ, settings, cpu_kv_cache_gib)
    with quick_imports():
        from pipelinerl.inference.server import run

    run(argv)


def room_in(room: AdapterRoom, model: str) -> AdapterRoom:
    """`room` with the layers of the model named, if it says that all of them may have an adapter.

    vLLM would wrap the embedding and the output head too, and compute with their zeros at every step.
    """
    folder = None if room.layers else local_folder(model)
    tensors = None if folder is None else read_manifest(folder)
    return room if tensors is None else replace(room, layers=layers_of(tensors))


def with_fp32_attention(settings: ServerSettings) -> ServerSettings:
    """`settings` with the attention backend that a model with latent attention (MLA) needs in fp32 on a CPU.

    On CPUs with AMX vLLM 0.32 takes the AMX one, which supports bf16 only.
    """
    options, _ = check_options(settings.vllm_kwargs)
    folder = local_folder(settings.model) if settings.on_cpu else None
    file = None if folder is None else folder / "config.json"
    if file is None or not file.is_file() or options.get("dtype", settings.dtype) not in ("float32", "float"):
        return settings
    config = json.loads(file.read_bytes())
    is_chosen = any(name.partition(".")[0] in ("attention-backend", "attention-config") for name in options)
    if is_chosen or not (config.get("text_config") or config).get("kv_lora_rank"):
        return settings
    return replace(settings, vllm_kwargs={**settings.vllm_kwargs, "attention-backend": "CPU_MLA"})


def _is_eager(kwargs: Mapping[str, object]) -> bool:
    return any(name.replace("_", "-") == "enforce-eager" and value is not False for name, value in kwargs.items())


def _main_standalone(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.inference.main", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder or name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default=CPU_TRANSPORT, help="which decides whether the server uses a GPU"
    )
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, else vLLM's choice")
    parser.add_argument("--fp32-head", action="store_true")
    parser.add_argument("--cpu-kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--adapter-rank", type=int, default=None, help="updates bring an adapter of at most this rank")
    parser.add_argument("--vllm-kwargs", type=json.loads, default={}, help="JSON object of vLLM options")
    args = parser.parse_args(arguments)
    on_cpu = TRANSPORTS[args.transport].on_cpu
    settings = ServerSettings(
        model=args.model,
        host=args.host,
        port=args.port,
        on_cpu=on_cpu,
        vllm_kwargs=args.vllm_kwargs,
        dtype=args.dtype or ("float32" if on_cpu else None),
        fp32_head=args.fp32_head,
        adapter=None if args.adapter_rank is None else AdapterRoom(args.adapter_rank),
    )
    try:
        serve(settings, args.cpu_kv_cache_gib)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
