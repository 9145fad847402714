"""CPU seconds of a server's API process for each 1,000 output tokens, with a stub for the engine; needs no GPU.

    python scripts/benchmark_api_process.py --held 1 64 --output FILE

The two routes take turns as in `benchmark_server.py`. `--held 1` is how vLLM hands tokens on, 64 how our scheduler
does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmark_common import REPOSITORY, Server, random_model, wait_healthy, write_result
from benchmark_server import measure


@contextlib.contextmanager
def stub_server(model: Path, held: int, log: Path) -> Iterator[Server]:
    """A server with a stub for its engine, stopped afterwards."""
    token = secrets.token_urlsafe(24)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [sys.executable, str(REPOSITORY / "scripts/api_process_stub.py"), "--model", str(model)]
    command += ["--port", str(port), "--held", str(held)]
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PIPELINERL_SERVER_TOKEN": token, "PYTHONPATH": paths}
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(process, url, started + 300, log)
        yield Server(url, token, time.monotonic() - started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", nargs="*", type=int, default=[1, 64])
    parser.add_argument("--route", nargs="*", choices=("vllm", "lean"), default=["vllm", "lean"])
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load = {name: getattr(args, name) for name in ("concurrency", "prompt_tokens", "max_tokens", "clients")}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = random_model("0.001", scratch / "model", torch.float32)
        for held in args.held:
            with stub_server(model, held, scratch / "server.log") as server:
                results[f"held {held}"] = measure(server, args)
                write_result(args.output, {**load, "results": results})


if __name__ == "__main__":
    main()
