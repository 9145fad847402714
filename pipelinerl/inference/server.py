"""vLLM's OpenAI server in this process: its options, and what CPUs need.

Imported only once the environment is set (`main.prepare_environment`): vLLM reads some variables at import.
"""

from __future__ import annotations

import argparse
import os
import signal

import uvloop
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.model_executor.models.config import MambaModelConfig
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs

from pipelinerl.inference.arguments import START_METHOD_KEY, start_method
from pipelinerl.inference.auth import App, Receive, Scope, Send, TokenMiddleware
from pipelinerl.inference.engine import UpdateRoute
from pipelinerl.inference.fast_output import FastRoute

#: Longest wait for open requests when the server ends. After the death of a worker some never end by themselves.
_GRACE_S = 5


def parser_of_vllm() -> argparse.ArgumentParser:
    """Of vLLM's command line, without shortened names: one would pass the checks of `arguments` and then mean an option
    that they refuse."""
    bare = FlexibleArgumentParser(prog="pipelinerl.inference.main", allow_abbrev=False)  # type: ignore[no-untyped-call]
    parser: argparse.ArgumentParser = make_arg_parser(bare)  # type: ignore[no-untyped-call]
    return parser


def option_names() -> set[str]:
    """The options of the installed vLLM, without dashes in front and without the `no-` forms of flags."""
    texts = {text.removeprefix("--") for action in parser_of_vllm()._actions for text in action.option_strings}
    return {name for name in texts if name[0] != "-" and (not name.startswith("no-") or name[3:] not in texts)}


def run(argv: list[str]) -> None:
    """Serve until a signal ends this process."""
    serve_hybrids_whole_prompts()
    args = parser_of_vllm().parse_args(argv)
    fork_engine(args)
    rotate_by_torch(args.compilation_config.custom_ops)
    validate_parsed_serve_args(args)
    uvloop.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    """vLLM's `run_server`, but forked processes leave its port and its wakeup descriptor for signals alone."""
    decorate_logs("APIServer")  # type: ignore[no-untyped-call]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, interrupt)  # until the HTTP server has its own
    address, listener = setup_server(args, reuse_port=False)  # type: ignore[no-untyped-call]

    def leave_to_parent() -> None:
        listener.close()
        signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=leave_to_parent)
    await run_server_worker(address, listener, args, timeout_graceful_shutdown=_GRACE_S)  # type: ignore[no-untyped-call]


def fork_engine(args: argparse.Namespace) -> None:
    """Have vLLM fork its processes where that is possible.

    Nothing may have used CUDA or a pool of threads before: vLLM checks the first, and its frontend does not compute.

    Args:
        args: vLLM's options, of which only `numa_bind` is read.
    """
    on_cpu = current_platform.is_cpu()
    can_fork = on_cpu or current_platform.is_cuda()
    os.environ[START_METHOD_KEY] = start_method(os.environ, on_cpu, args.numa_bind) if can_fork else "spawn"
    if on_cpu and os.environ[START_METHOD_KEY] == "fork":
        keep_processes()


class ServerMiddleware:
    """Wraps vLLM's routes: the token check, without which nothing is reachable, and our own routes.

    One class, because vLLM warns of duplicates if `--middleware` is repeated.
    """

    def __init__(self, app: App) -> None:
        self._app = TokenMiddleware(UpdateRoute(FastRoute(app)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def keep_processes() -> None:
    """Undo what vLLM does on a CPU whenever it checks a configuration, for the sake of bound threads: it sets `spawn`,
    and gives a single worker a process of its own, for which the engine waits in a loop on another core."""
    check = current_platform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        method, executor = os.environ[START_METHOD_KEY], parallel.distributed_executor_backend
        check(vllm_config)
        os.environ[START_METHOD_KEY] = method
        if executor == "uni":
            parallel.distributed_executor_backend = executor

    type(current_platform).check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[method-assign, assignment]


def serve_hybrids_whole_prompts() -> None:
    """Turn the prefix cache off for models with a recurrent state where prompts are not cut into chunks, as on a CPU.

    vLLM ends with an assertion instead: it keeps such states at the borders of chunks.
    """
    verify = MambaModelConfig.verify_and_update_config

    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        if not vllm_config.scheduler_config.enable_chunked_prefill:
            vllm_config.cache_config.enable_prefix_caching = False
        verify(vllm_config)

    MambaModelConfig.verify_and_update_config = staticmethod(verify_and_update_config)  # type: ignore[assignment]


def rotate_by_torch(custom_ops: list[str]) -> None:
    """Turn vLLM's kernel for rotary positions off on a CPU, unless the user chose one.

    In vLLM 0.32 it gives queries of several heads wrong positions where they come in three dimensions, as in DeepSeek
    and LFM2.

    Args:
        custom_ops: of vLLM's compilation config; gets the name.
    """
    if current_platform.is_cpu() and not {"+rotary_embedding", "-rotary_embedding"}.intersection(custom_ops):
        custom_ops.append("-rotary_embedding")
