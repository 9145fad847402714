"""Throughput and latency of the stream backends, against a naive reader, on one core.

    python scripts/benchmark_streams.py [--backends files redis] [--tokens 4096] [--records 1000] [--repeats 5]

The naive reader polls with sleeps, takes one record a read and decodes it with the standard json module; it reads the
same records from a file of JSON lines, or from a Redis stream of JSON texts. Both readers take turns in one process.
Everything, the Redis server too, is bound to one core. A record is a group of one sample. The latency is the time from
before the write of one record, in another process, until a blocked reader holds it decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import redis

from pipelinerl.config.resources import FileStreams, RedisStreams
from pipelinerl.records import Group, Sample, VersionSpan
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer, connect

TOPIC, INSTANCE, NAIVE_KEY = "actor", "actor_0", "naive"
POLL_S = 0.01
PAUSE_S = 0.02


def make_group(tokens: int, number: int) -> Group:
    """A group of one sample of `tokens` tokens, an eighth of them prompt, with log-probs as a server gives them."""
    rng = random.Random(number)
    prompt = tokens // 8
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    # float32 on the server, so a float64 here has all of its digits
    logprobs = [struct.unpack("f", struct.pack("f", -rng.expovariate(2)))[0] for _ in range(tokens - prompt)]
    sample = Sample(
        id=f"0-{number}/r0/s0",
        group_id=f"0-{number}",
        rollout_id=f"0-{number}/r0",
        input_ids=ids,
        labels=[-100] * prompt + ids[prompt:],
        logprobs=logprobs,
        reward=1.0,
        finished=True,
        finish_reason="stop",
        prompt_tokens=prompt,
        output_tokens=tokens - prompt,
        version_spans=[VersionSpan(number, 0, tokens - prompt)],
        metadata={"sent": 0.0},
    )
    return Group(id=f"0-{number}", problem_id="p", dataset_name="d", samples=[sample], rollouts=[])


def read_naive_file(path: Path, count: int) -> int:
    """Poll a file of JSON lines."""
    read = 0
    with path.open(encoding="utf-8") as file:
        while read < count:
            line = file.readline()
            if not line:
                time.sleep(POLL_S)
                continue
            json.loads(line)
            read += 1
    return read


def read_naive_redis(url: str, count: int) -> int:
    """Poll a Redis stream of JSON texts, one entry a read."""
    read, last = 0, "0-0"
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        while read < count:
            reply: Any = client.xread({NAIVE_KEY: last}, count=1)
            if not reply:
                time.sleep(POLL_S)
                continue
            last, fields = reply[0][1][0]
            json.loads(fields[b"r"])
            read += 1
    return read


def read_ours(hub: StreamHub, count: int) -> int:
    reader = hub.reader(TOPIC, INSTANCE, Group)
    read = 0
    while read < count:
        read += len(reader.read(10))
    reader.close()
    return read


class Stopwatch:
    """Seconds by the clock and of CPU (this process and `server_pid`) of one call."""

    def __init__(self, server_pid: int | None) -> None:
        self._server_pid = server_pid

    def __call__(self, work: Callable[[], int]) -> tuple[float, float]:
        """(records per second, records per CPU second) of `work`, which returns the number of records."""
        wall, cpu = time.perf_counter(), self._cpu()
        count = work()
        return count / (time.perf_counter() - wall), count / (self._cpu() - cpu)

    def _cpu(self) -> float:
        seconds = time.process_time()
        if self._server_pid is not None:
            fields = Path(f"/proc/{self._server_pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds


def measure_throughput(
    hub: StreamHub, groups: list[Group], repeats: int, naive: Callable[[], int], watch: Stopwatch
) -> None:
    """Write the groups, then read them in turns with both readers."""

    def write() -> int:
        writer = hub.writer(TOPIC, INSTANCE, Group)
        for group in groups:
            writer.write(group)
        writer.close()
        return len(groups)

    written, _ = watch(write)
    ours, theirs = [], []
    for _ in range(repeats):
        theirs.append(watch(naive))
        ours.append(watch(lambda: read_ours(hub, len(groups))))
    print(f"  written      {written:8,.0f} records/s")
    for name, rates in (("naive reader", theirs), ("this reader", ours)):
        walls = [wall for wall, _ in rates]
        per_cpu = _middle([cpu for _, cpu in rates])
        print(f"  {name:12} {_spread(walls)} records/s by the clock, {per_cpu:,.0f} per CPU second")
    for index, unit in enumerate(("by the clock", "per CPU second")):
        ratios = [mine[index] / naive_[index] for mine, naive_ in zip(ours, theirs, strict=True)]
        print(f"  ratio        {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) {unit}")


def measure_latency(hub: StreamHub, args: argparse.Namespace, root: Path, environ: dict[str, str]) -> None:
    """Wait at the tail for single records that another process writes."""
    command = [sys.executable, __file__, "--write-to", str(root), "--tokens", str(args.tokens)]
    reader = hub.reader(TOPIC, INSTANCE, Group, args.records)
    writer = subprocess.Popen([*command, "--records", str(args.latency_records)], env={**os.environ, **environ})
    seconds: list[float] = []
    while len(seconds) < args.latency_records:
        for entry in reader.read(60):
            seconds.append(time.monotonic() - entry.record.samples[0].metadata["sent"])
    writer.wait(60)
    reader.close()
    cut = statistics.quantiles([1000 * value for value in seconds], n=20)
    print(f"  latency      {cut[9]:.2f} ms median, {cut[18]:.2f} ms 95 %, n = {len(seconds)}")


def write_slowly(root: Path, tokens: int, count: int) -> None:
    """The other process of `measure_latency`."""
    backend = "redis" if os.environ.get(REDIS_URL_KEY) else "files"
    hub = StreamHub((RedisStreams if backend == "redis" else FileStreams)(), RunDir(root), "benchmark")
    writer = hub.writer(TOPIC, INSTANCE, Group)
    group = make_group(tokens, 0)
    for _ in range(count):
        time.sleep(PAUSE_S)
        sample = msgspec.structs.replace(group.samples[0], metadata={"sent": time.monotonic()})
        writer.write(msgspec.structs.replace(group, samples=[sample]))
    writer.close()


@contextlib.contextmanager
def open_backend(backend: str, root: Path) -> Iterator[tuple[StreamHub, dict[str, str], int | None]]:
    """(hub, environment for other processes, pid of the server) of one backend."""
    config = (RedisStreams if backend == "redis" else FileStreams)()
    with contextlib.ExitStack() as stack:
        environ, pid = {}, None
        if backend == "redis":
            server = stack.enter_context(RedisServer(root / "redis", config))
            environ, pid = {REDIS_URL_KEY: server.url}, server.pid
        yield StreamHub(config, RunDir(root), "benchmark", environ), environ, pid


def write_naive(backend: str, root: Path, groups: list[Group], environ: dict[str, str]) -> Callable[[], int]:
    """Write the records as the naive reader wants them; returns that reader."""
    lines = [json.dumps(msgspec.to_builtins(group)) for group in groups]
    if backend == "files":
        path = root / "naive.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return lambda: read_naive_file(path, len(groups))
    url = environ[REDIS_URL_KEY]
    with contextlib.closing(connect(url)) as client:
        for line in lines:
            client.xadd(NAIVE_KEY, {"r": line})
    return lambda: read_naive_redis(url, len(groups))


def _middle(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float]) -> str:
    return f"{_middle(values):8,.0f} ({min(values):,.0f} - {max(values):,.0f})"


def main() -> int:
    """Print one block of figures for each backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=["files", "redis"], default=["files", "redis"])
    parser.add_argument("--tokens", type=int, default=4096, help="of one record")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency-records", type=int, default=200)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="all work runs on this core")
    parser.add_argument("--write-to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_to is not None:
        write_slowly(args.write_to, args.tokens, args.records)
        return 0
    os.sched_setaffinity(0, {args.core})
    groups = [make_group(args.tokens, number) for number in range(args.records)]
    for backend in args.backends:
        with tempfile.TemporaryDirectory(prefix="streams-") as folder:
            root = Path(folder)
            with open_backend(backend, root) as (hub, environ, pid):
                print(f"{backend}: {args.records} records of {args.tokens} tokens, one core, {args.repeats} repeats")
                naive = write_naive(backend, root, groups, environ)
                measure_throughput(hub, groups, args.repeats, naive, Stopwatch(pid))
                measure_latency(hub, args, root, environ)
    return 0


if __name__ == "__main__":
    sys.exit(main())
