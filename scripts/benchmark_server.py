"""Tokens per second of one server under the load of a run: many concurrent requests with log-probs, over HTTP.

    python scripts/benchmark_server.py --model FOLDER --device cuda --held 0 64
    python scripts/benchmark_server.py --model FOLDER --device cuda --flags '{}' '{"stream-interval": 16}'
    python scripts/benchmark_server.py --model FOLDER --url URL --token TOKEN --output FILE
    python scripts/benchmark_server.py --random-model 0.001 --concurrency 64 --max-tokens 128
    python scripts/benchmark_server.py --model FOLDER --device cuda --graphs decode \
        --lengths varied --turns 8 --route fast
    python scripts/benchmark_server.py --random-model 1.5 --device cuda --graphs decode --adapter-rank 0 16 --route fast

Routes: `vllm` is JSON with one object a token, `fast` the compact answer of our own servers. They take turns, round by
round, on the same server. Each flag set and each number of held tokens gets a server of its own, one after the other on
the same card; so does each rank of an adapter. A server with a rank holds
what `finetune.lora.sync=adapter` gives it: every request goes through the adapter, here through the zeros that are
there before the first update, which cost what others do. Rank 0 is a server without, as with merged matrices. Several
client processes send the load, so that the clients are not what is measured. The first round warms up and is not
counted. Every client sends `--turns` requests one after the other; with `--lengths varied` one in ten is eleven times
as long as the others, `--max-tokens` is the mean, and the load is even only in long rounds. Of a server on this machine
the CPU seconds of the API and engine processes for each 1,000 output tokens are given too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import random
import tempfile
import time
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from benchmark_common import (
    GRAPHS,
    Server,
    client_session,
    cpu_seconds,
    generate,
    make_parser,
    random_model,
    running_server,
    server_processes,
    spread,
    write_result,
)
from benchmark_task import answer_tokens

#: What is asked for: `logprobs` by the option's word.
LOGPROBS = {"with": 0, "without": None}


def client(server: Server, count: int, args: argparse.Namespace, route: str, logprobs: int | None, seed: int) -> int:
    """Send `count` requests at once, and so on `args.turns` times; returns output tokens. Runs in its own process."""
    draws = random.Random(seed)

    async def one(session: Any, ids: list[int], length: int) -> int:
        if route == "vllm":
            return len((await generate(session, server, ids, length, logprobs=logprobs))["token_ids"])
        packed = await generate(session, server, ids, length, is_fast=True, logprobs=logprobs)
        if logprobs is not None and len(packed.logprobs or b"") != len(packed.token_ids):
            raise RuntimeError("the server left out log-probs")
        return len(packed.token_ids) // 4

    async def turns(session: Any, ids: list[int], lengths: list[int]) -> int:
        tokens = 0
        for turn, length in enumerate(lengths):
            # The first token differs, so that no turn finds the prompt of another in the cache.
            tokens += await one(session, [(ids[0] - 5 + turn) % 400 + 5, *ids[1:]], length)
        return tokens

    async def run() -> int:
        async with client_session() as session:
            prompts = [[(31 * n + 7 * k) % 400 + 5 for k in range(args.prompt_tokens)] for n in range(count)]
            kind = "high" if args.lengths == "varied" else "low"
            lengths = [
                [answer_tokens(args.max_tokens, kind, draws.random()) for _ in range(args.turns)] for _ in prompts
            ]
            return sum(await asyncio.gather(*map(turns, itertools.repeat(session), prompts, lengths)))

    return asyncio.run(run())


def one_round(pool: Pool, server: Server, args: argparse.Namespace, route: str, logprobs: int | None) -> dict[str, Any]:
    """Tokens per second of one round, and CPU seconds for each 1,000 tokens by part of the server."""
    processes = server_processes(server)
    before = cpu_seconds(processes)
    start = time.perf_counter()
    share = args.concurrency // args.clients
    # The same seeds in every round: all servers get the same lengths.
    calls = [(server, share, args, route, logprobs, seed) for seed in range(args.clients)]
    tokens = sum(pool.starmap(client, calls))
    seconds = time.perf_counter() - start
    after = cpu_seconds(processes)
    used = {f"{part} CPU s": (after[part] - before[part]) / tokens * 1000 for part in after}
    return {"tokens/s": tokens / seconds, **used}


def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Every route and kind of request in turn, `args.repeats` times; each figure with its range."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    with multiprocessing.get_context("fork").Pool(args.clients) as pool:
        for _, word, route in itertools.product(range(args.repeats + 1), args.log_probs, args.route):
            label = f"{route}, {word} log-probs"
            rounds.setdefault(label, []).append(one_round(pool, server, args, route, LOGPROBS[word]))
    return {name: {key: spread(each[key] for each in found[1:]) for key in found[0]} for name, found in rounds.items()}


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--random-model", help="size in billions of a random model, made for this run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--server-gpu", default="0")
    parser.add_argument("--flags", nargs="*", default=["{}"], help="flag sets of vLLM, one JSON object each")
    parser.add_argument(
        "--held", nargs="*", default=["64"], help="tokens held back at most; 0: each is shipped at once"
    )
    parser.add_argument("--graphs", choices=sorted(GRAPHS), help="which CUDA graphs; default: what vLLM does")
    parser.add_argument(
        "--adapter-rank", nargs="*", type=int, default=[0], help="of the server's adapter; 0: it has none"
    )
    parser.add_argument("--lengths", choices=("equal", "varied"), default="equal")
    parser.add_argument("--turns", type=int, default=1, help="requests of each client in a round, one after the other")
    parser.add_argument("--route", nargs="*", choices=("vllm", "fast"), default=["vllm", "fast"])
    parser.add_argument("--log-probs", nargs="*", choices=sorted(LOGPROBS), default=["with", "without"])
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url")
    parser.add_argument("--token")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.url is None and (args.model is None) == (args.random_model is None):
        parser.error("one of --model, --random-model and --url is needed")
    return args


def options_of(args: argparse.Namespace) -> dict[str, object]:
    """Options of vLLM that every server gets."""
    longest = args.prompt_tokens + answer_tokens(args.max_tokens, "high" if args.lengths == "varied" else "low", 0.0)
    options: dict[str, object] = {"max_model_len": max(1024, longest), "max_num_seqs": args.concurrency}
    if args.device == "cuda":
        options["gpu_memory_utilization"] = 0.5
    if args.graphs:
        options["compilation-config"] = GRAPHS[args.graphs]
    return options


def main() -> None:
    args = arguments()
    results: dict[str, Any] = {}
    settings: dict[str, dict[str, object]] = {}
    shown = ("concurrency", "prompt_tokens", "max_tokens", "clients", "lengths", "turns", "graphs")
    load = {name: getattr(args, name) for name in shown}
    if args.url:
        results["running server"] = measure(Server(args.url, args.token, 0.0), args)
        write_result(args.output, {**load, "results": results})
        return
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = args.model or str(random_model(args.random_model, scratch / "model", dtype))
        for flags, held, rank in itertools.product(args.flags, args.held, args.adapter_rank):
            kwargs = {**options_of(args), **json.loads(flags)}
            words = ["--fp32-head", *(["--adapter-rank", str(rank)] if rank else [])]
            with running_server(
                model, args.device, args.server_gpu, kwargs, scratch / "server.log", words, PIPELINERL_HELD_TOKENS=held
            ) as server:
                name = f"flags {flags}, held {held}{f', adapter of rank {rank}' if rank else ''}"
                name += f" (start {server.start_s:.0f} s)"
                settings[name] = {"flags": flags, "held": held, "rank": rank}
                results[name] = measure(server, args)
                write_result(args.output, {**load, "settings": settings, "results": results})


if __name__ == "__main__":
    main()
