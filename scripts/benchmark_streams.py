"""Throughput and latency of the stream backends, bound to one core with everything that they start.

    python scripts/benchmark_streams.py [--backends files redis] [--tokens 4096] [--records 1000] [--repeats 5]

A record is a group of one sample. The latency is the time from before the write of one record, in another process,
until a blocked reader holds it decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_common import child_environ, made_sample, make_parser, spread, write_result
from msgspec.structs import replace

from pipelinerl.config.resources import FileStreams, RedisStreams
from pipelinerl.records import Group
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer

TOPIC, INSTANCE = "actor", "actor_0"
PAUSE_S = 0.02


def make_group(tokens: int, number: int) -> Group:
    """A group of one sample of `tokens` tokens, an eighth of them prompt, with log-probs as a server gives them."""
    rng = random.Random(number)
    prompt = tokens // 8
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    # float32 on the server, so a float64 here has all of its digits
    logprobs = [struct.unpack("f", struct.pack("f", -rng.expovariate(2)))[0] for _ in range(tokens - prompt)]
    sample = made_sample(f"0-{number}/r0/s0", ids[:prompt], ids[prompt:], logprobs=logprobs, metadata={"sent": 0.0})
    return Group(id=f"0-{number}", problem_id="p", dataset_name="d", samples=[sample], rollouts=[])


def read(hub: StreamHub, start: int, count: int) -> list[float]:
    """Read `count` records from offset `start`; return how old each was when it was decoded, in seconds."""
    reader = hub.reader(TOPIC, INSTANCE, Group, start)
    ages: list[float] = []
    while len(ages) < count:
        entries = reader.read(30.0)
        ages += [time.monotonic() - entry.record.samples[0].metadata["sent"] for entry in entries]
    reader.close()
    return ages


def measure(hub: StreamHub, root: Path, environ: dict[str, str], args: argparse.Namespace) -> dict[str, object]:
    groups = [make_group(args.tokens, number) for number in range(args.records)]
    writer = hub.writer(TOPIC, INSTANCE, Group)
    started = time.perf_counter()
    for group in groups:
        writer.write(group)
    writer.close()
    written_per_s = args.records / (time.perf_counter() - started)
    rates = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        read(hub, 0, args.records)
        rates.append(args.records / (time.perf_counter() - started))
    words = ["--write-to", str(root), "--tokens", str(args.tokens), "--records", str(args.latency_records)]
    child = subprocess.Popen([sys.executable, __file__, *words], env=child_environ(**environ))
    ages = read(hub, args.records, args.latency_records)
    child.wait(60)
    cut = statistics.quantiles([1000 * age for age in ages], n=20)
    return {
        "written/s": written_per_s,
        "read/s": spread(rates),
        "latency_ms": {"median": cut[9], "p95": cut[18], "n": len(ages)},
    }


def write_slowly(root: Path, tokens: int, count: int) -> None:
    """The other process of the latency."""
    config = RedisStreams() if os.environ.get(REDIS_URL_KEY) else FileStreams()
    writer = StreamHub(config, RunDir(root), "benchmark").writer(TOPIC, INSTANCE, Group)
    group = make_group(tokens, 0)
    for _ in range(count):
        time.sleep(PAUSE_S)
        sample = replace(group.samples[0], metadata={"sent": time.monotonic()})
        writer.write(replace(group, samples=[sample]))
    writer.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backends", nargs="+", choices=["files", "redis"], default=["files", "redis"])
    parser.add_argument("--tokens", type=int, default=4096, help="of one record")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency-records", type=int, default=200)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="all work runs on this core")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write-to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_to is not None:
        write_slowly(args.write_to, args.tokens, args.records)
        return
    os.sched_setaffinity(0, {args.core})
    results: dict[str, dict[str, object]] = {}
    for backend in args.backends:
        with contextlib.ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
            config = RedisStreams() if backend == "redis" else FileStreams()
            environ = {}
            if isinstance(config, RedisStreams):
                environ = {REDIS_URL_KEY: stack.enter_context(RedisServer(root / "redis", config)).url}
            hub = StreamHub(config, RunDir(root), "benchmark", environ)
            results[backend] = measure(hub, root, environ, args)
    write_result(args.output, {"tokens": args.tokens, "records": args.records, "results": results})


if __name__ == "__main__":
    main()
