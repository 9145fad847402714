"""Main of one vLLM server (job kinds `actor_llm` and `preprocessor_llm`).

In a run: `--run-dir DIR --job NAME`. On its own: `--model PATH --port N [--transport gloo] [--vllm-kwargs JSON]`, with
the token in `PIPELINERL_SERVER_TOKEN`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelinerl.errors import EXIT_USER_ERROR, UserError
from pipelinerl.inference.arguments import AdapterRoom, ServerSettings

if TYPE_CHECKING:
    from pipelinerl.config.finetune import LoraConfig
    from pipelinerl.role import RoleContext


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(word == "--run-dir" or word.startswith("--run-dir=") for word in arguments):
        from pipelinerl.role import run_role

        return run_role(serve_job, arguments)
    return _main_standalone(arguments)


def serve_job(context: RoleContext) -> None:
    """Serve the model of a run as the world plan says."""
    from pipelinerl.inference.server import serve

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
        vllm_kwargs=config.vllm_config.vllm_kwargs,
        seed=config.seed + job.idx,
        dtype="float32" if on_cpu else None,
        fp32_head=config.fp32_lm_head,
        quantization=config.vllm_config.quantization,
        can_sleep=not on_cpu and config.world.placement == "colocated",
        trust_remote_code=config.finetune.trust_remote_code,
        # Servers of a reference model serve the frozen model alone.
        adapter=adapter_room(config.finetune.lora) if job.kind == "actor_llm" else None,
    )


def adapter_room(lora: LoraConfig) -> AdapterRoom | None:
    """What servers keep free for the adapter that updates bring; None if they bring whole models."""
    if not lora.enabled or lora.sync != "adapter":
        return None
    # A target may be written with a part of what is in front of it: self_attn.q_proj.
    return AdapterRoom(lora.r, tuple(name.rpartition(".")[2] for name in lora.target_modules))


def _main_standalone(arguments: list[str]) -> int:
    from pipelinerl.inference.server import serve

    parser = argparse.ArgumentParser(prog="python -m pipelinerl.inference.main", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder or name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    transports = ("gloo", "nccl", "ipc")
    parser.add_argument("--transport", choices=transports, default="gloo", help="gloo means a server without a GPU")
    parser.add_argument("--dtype", default=None, help="float32 with --transport gloo, else vLLM's choice")
    parser.add_argument("--fp32-head", action="store_true")
    parser.add_argument("--cpu-kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--adapter-rank", type=int, default=None, help="updates bring an adapter of at most this rank")
    parser.add_argument("--vllm-kwargs", type=json.loads, default={}, help="JSON object of vLLM options")
    args = parser.parse_args(arguments)
    settings = ServerSettings(
        model=args.model,
        host=args.host,
        port=args.port,
        on_cpu=args.transport == "gloo",
        vllm_kwargs=args.vllm_kwargs,
        dtype=args.dtype or ("float32" if args.transport == "gloo" else None),
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
