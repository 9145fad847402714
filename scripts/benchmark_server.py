"""Tokens per second of one server under the load of a run: many concurrent requests with log-probs, over HTTP.

    python scripts/benchmark_server.py --model FOLDER --device cuda --flags '{}' '{"stream-interval": 16}'
    python scripts/benchmark_server.py --model FOLDER --url URL --token TOKEN

Each flag set gets a server of its own, one after the other on the same card. Several client processes send the load,
so that the clients are not what is measured. The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark_common import Server, client_session, generate, running_server, write_result


def client(server: Server, count: int, args: argparse.Namespace, logprobs: int | None) -> int:
    """Send `count` requests at once; returns output tokens. Runs in a process of its own."""

    async def run() -> int:
        async with client_session() as session:
            prompts = [[(31 * n + 7 * k) % 400 + 5 for k in range(args.prompt_tokens)] for n in range(count)]
            calls = [generate(session, server, ids, args.max_tokens, logprobs=logprobs) for ids in prompts]
            return sum(len(choice["token_ids"]) for choice in await asyncio.gather(*calls))

    return asyncio.run(run())


def throughput(server: Server, args: argparse.Namespace, logprobs: int | None) -> dict[str, Any]:
    """Output tokens per second of `args.repeats` rounds."""
    share = args.concurrency // args.clients
    rates = []
    with multiprocessing.get_context("fork").Pool(args.clients) as pool:
        for _ in range(args.repeats + 1):
            start = time.perf_counter()
            tokens = sum(pool.starmap(client, [(server, share, args, logprobs)] * args.clients))
            rates.append(tokens / (time.perf_counter() - start))
    rates = rates[1:]
    return {"median": statistics.median(rates), "range": [min(rates), max(rates)], "repeats": len(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--server-gpu", default="0")
    parser.add_argument("--flags", nargs="*", default=["{}"], help="flag sets of vLLM, one JSON object each")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url")
    parser.add_argument("--token")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    base: dict[str, object] = {"max_model_len": 1024, "max_num_seqs": args.concurrency}
    if args.device == "cpu":
        base |= {"enforce-eager": "", "block_size": 32}
    else:
        base |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.5}
    results: dict[str, Any] = {}

    def measure(name: str, server: Server) -> None:
        for label, logprobs in (("with log-probs", 0), ("without log-probs", None)):
            results[f"{name}, {label}"] = throughput(server, args, logprobs)
            load = {"concurrency": args.concurrency, "max_tokens": args.max_tokens, "clients": args.clients}
            write_result(args.output, {**load, "tokens_per_s": results})

    if args.url:
        measure("running server", Server(args.url, args.token, 0.0))
        return
    transport = "nccl" if args.device == "cuda" else "gloo"
    for flags in args.flags:
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch) / "server.log"
            environ = {"CUDA_VISIBLE_DEVICES": args.server_gpu}
            with running_server(args.model, transport, {**base, **json.loads(flags)}, log, True, environ) as server:
                measure(f"flags {flags} (start {server.start_s:.0f} s)", server)


if __name__ == "__main__":
    main()
