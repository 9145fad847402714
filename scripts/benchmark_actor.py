"""Rollouts per second and core of the actor, beside a plain aiohttp + json client, against one stub server.

    python scripts/benchmark_actor.py [--seconds 20] [--concurrent 1024] [--output-tokens 64] [--json FILE]

The actor is the real one: problems, scheduler, one worker process, client, samples, groups written to a stream. The
plain client does one chat completion per rollout and nothing else. Both talk to the same stub, one after the other. A
rate per core is rollouts divided by the CPU seconds of the processes that make them, so that it hardly depends on what
else the machine does. The plain client is measured twice: with the log-probs and token ids that training needs, and
without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import psutil

from pipelinerl.records.completion import PackedSpan, encode_completion, pack_ids

TOKEN = secrets.token_urlsafe(16)
TASK = '''
import asyncio, atexit, json, os, time

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult

PROBE = []


def load_problems(dataset_names):
    question = "How far is it from here to there, if the first step is half of the way and each other half of it? "
    return [{"id": str(i), "dataset": "train", "question": question + str(i)} for i in range(512)]


async def probe(file, period=0.01):
    """Write how late the event loop is, in seconds, once a second."""
    lags, written = [], time.monotonic()
    while True:
        started = time.monotonic()
        await asyncio.sleep(period)
        now = time.monotonic()
        lags.append(now - started - period)
        if now - written > 1:
            with open(file, "a") as out:
                out.write(json.dumps(lags) + "\\n")
            lags, written = [], now


async def generate_rollout(cfg, llm, problem, session):
    if not PROBE:
        PROBE.append(asyncio.create_task(probe(cfg.custom.lag_file)))
    call = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": problem["question"]}]), session)
    text = make_training_text(llm, call)
    text.reward = float(len(call.output.content) % 2)
    metrics = BaseMetrics(reward=text.reward, success=text.reward > 0, no_error=True, no_answer=False)
    return RolloutResult(training_texts=[text], metrics=metrics, latency=0.0, dataset_name="train")
'''


def fast_answer(ids: list[int]) -> bytes:
    """An answer of `/inference/v1/generate`, as our servers write it for our client."""
    logprobs = array("f", [-0.123456789 - i / 1000 for i in ids]).tobytes()
    return encode_completion(pack_ids(ids), logprobs, "stop", None, [PackedSpan("0", 0, len(ids))])


def generate_answer(ids: list[int]) -> bytes:
    """An answer of `/inference/v1/generate`, as a plain vLLM server writes it."""
    content = [
        {"token": f"token_id:{i}", "token_id": i, "logprob": -0.123456789 - i / 1000, "bytes": None, "top_logprobs": [],
         "rank": 1}
        for i in ids
    ]  # fmt: skip
    choice = {
        "index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "stop_reason": None, "token_ids": ids,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }  # fmt: skip
    return json.dumps(
        {"request_id": "generate-tokens-0123456789", "choices": [choice], "prompt_logprobs": None}
    ).encode()


def chat_answer(ids: list[int], with_logprobs: bool) -> bytes:
    """An answer of `/v1/chat/completions`, as the server writes it."""
    words = [f" w{i}" for i in ids]
    logprobs = None
    if with_logprobs:
        content = [
            {"token": word, "logprob": -0.123456789 - i / 1000, "bytes": list(word.encode()), "top_logprobs": []}
            for i, word in zip(ids, words, strict=True)
        ]
        logprobs = {"content": content}
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "".join(words), "tool_calls": []},
        "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None,
        "token_ids": ids if with_logprobs else None,
    }  # fmt: skip
    usage = {"prompt_tokens": 40, "completion_tokens": len(ids), "total_tokens": 40 + len(ids)}
    body = {"id": "chatcmpl-0123456789", "object": "chat.completion", "created": 1, "model": "actor"}
    return json.dumps({**body, "choices": [choice], "usage": usage}).encode()


class Stub(asyncio.Protocol):
    """One connection of the stub server: reads a request, writes a ready answer. No more HTTP than that."""

    served = 0
    answers: dict[bytes, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            lowered = head.lower()
            at = lowered.find(b"content-length:")
            length = int(lowered[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body = self._data[end + 4 : end + 4 + length]
            self._data = self._data[end + 4 + length :]
            path = head.split(b" ", 2)[1]
            Stub.served += path not in (b"/count", b"/health", b"/v1/models")
            if path == b"/count":
                answer = b"%d" % Stub.served
            elif path == b"/v1/chat/completions":
                answer = Stub.answers[b"logprobs" if b'"logprobs": true' in body else b"chat"]
            else:
                answer = Stub.answers.get(path, b"{}")
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )


def serve(output_tokens: int, answers: str) -> None:
    """Run the stub; its first line on stdout is its port."""
    import uvloop

    ids = [3 + (7 * i) % 190 for i in range(output_tokens)]
    Stub.answers = {
        b"/inference/v1/generate": fast_answer(ids) if answers == "fast" else generate_answer(ids),
        b"/v1/models": b'{"object": "list", "data": [{"id": "actor", "object": "model", "max_model_len": 32768}]}',
        b"chat": chat_answer(ids, False),
        b"logprobs": chat_answer(ids, True),
    }

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    uvloop.run(run())


def plain_client(url: str, concurrent: int, with_logprobs: bool) -> None:
    """Chat completions without end, `concurrent` at once, with aiohttp and json."""
    import aiohttp

    question = (
        "How far is it from here to there, if the first step is half of the way and each other half of the rest? "
    )

    async def rollouts(session: aiohttp.ClientSession, number: int) -> None:
        while True:
            body: dict[str, Any] = {
                "model": "actor", "messages": [{"role": "user", "content": question + str(number)}],
                "max_tokens": 8192, "temperature": 1.0,
            }  # fmt: skip
            if with_logprobs:
                body |= {"logprobs": True, "return_token_ids": True}
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                answer = json.loads(await response.text())
            choice = answer["choices"][0]
            float(len(choice["message"]["content"]) % 2)
            if with_logprobs:
                [entry["logprob"] for entry in choice["logprobs"]["content"]]

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(rollouts(session, number) for number in range(concurrent)))

    asyncio.run(run())


def count(url: str) -> int:
    import urllib.request

    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/count", timeout=10) as response:
        return int(response.read())


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(url: str, processes: list[psutil.Process], stub: psutil.Process, seconds: float) -> dict[str, float]:
    """Rates over `seconds` of what runs now."""
    started, first, cpu, stub_cpu = time.monotonic(), count(url), cpu_s(processes), cpu_s([stub])
    time.sleep(seconds)
    served, wall_s = count(url) - first, time.monotonic() - started
    cpu, stub_cpu = cpu_s(processes) - cpu, cpu_s([stub]) - stub_cpu
    return {
        "rollouts": served,
        "rollouts_per_s": served / wall_s,
        "rollouts_per_s_per_core": served / cpu,
        "cpu_ms_per_rollout": 1000 * cpu / served,
        "stub_rollouts_per_s_per_core": served / stub_cpu,
    }


def measure_plain(url: str, stub: psutil.Process, options: argparse.Namespace, with_logprobs: bool) -> dict[str, float]:
    role = "plain-logprobs" if with_logprobs else "plain"
    argv = [sys.executable, __file__, "--role", role, "--url", url, "--concurrent", str(options.concurrent)]
    client = subprocess.Popen(argv)
    try:
        time.sleep(options.warmup_s)
        return measure(url, [psutil.Process(client.pid)], stub, options.seconds)
    finally:
        client.kill()
        client.wait()


def measure_actor(url: str, stub: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="benchmark-actor-") as name:
        folder = Path(name)
        actor = start_actor(folder, url, options)
        try:
            process = psutil.Process(actor.pid)
            wait_for_rollouts(url, actor, folder)
            time.sleep(options.warmup_s)
            workers = process.children()
            lag_file = folder / "lag.jsonl"
            lag_file.unlink(missing_ok=True)
            own_cpu = cpu_s([process])
            result: dict[str, Any] = measure(url, [process, *workers], stub, options.seconds)
            result["cpu_ms_per_rollout_of_the_actor_process"] = 1000 * (cpu_s([process]) - own_cpu) / result["rollouts"]
            lines = lag_file.read_text().splitlines()
            lags = sorted(lag for line in lines for lag in json.loads(line))
            result["loop_lag_p50_ms"] = 1000 * lags[len(lags) // 2]
            result["loop_lag_p99_ms"] = 1000 * lags[min(len(lags) - 1, int(len(lags) * 0.99))]
            return result
        finally:
            if actor.poll() is None:
                for child in [*psutil.Process(actor.pid).children(recursive=True), actor]:
                    child.kill()
            actor.wait()


def start_actor(folder: Path, url: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Prepare a run directory with one server and start the actor on it; the weights of version 0 are there."""
    from pipelinerl.config.load import save_config
    from pipelinerl.config.run import RunConfig
    from pipelinerl.records import TrainerMessage, WeightUpdateSuccess
    from pipelinerl.role import TOKEN_KEY
    from pipelinerl.rundir.identity import RunIdentity, write_identity
    from pipelinerl.rundir.layout import RunDir
    from pipelinerl.streams.hub import StreamHub
    from pipelinerl.tiny.tokenizer import build_tokenizer
    from pipelinerl.world import Job, WorldMap

    (folder / "benchmark_task.py").write_text(TASK)
    build_tokenizer(64).save_pretrained(folder / "model")
    files = RunDir(folder / "run")
    config = RunConfig.model_validate(
        {
            "output_dir": str(files.root),
            "model_path": str(folder / "model"),
            "attempts": options.attempts,
            "dataset_loader": "benchmark_task.load_problems",
            "train_dataset_names": ["train"],
            "custom": {"lag_file": str(folder / "lag.jsonl")},
            "actor": {"rollout_policy": "benchmark_task.generate_rollout", "llm_max_rollouts": options.concurrent},
        }
    )
    files.config_file.parent.mkdir(parents=True)
    save_config(config, files.config_file)
    write_identity(files.identity_file, RunIdentity(run_id="benchmark", incarnation=0))
    jobs = [
        Job(kind, f"{kind}_0", 0, 0, 0, "127.0.0.1", [], None, address, None, 1)
        for kind, address in (("actor_llm", url), ("actor", None))
    ]
    files.world_file.write_text(WorldMap(jobs, "cpu", 1, 0, 1, "127.0.0.1", 1).to_json())
    writer = StreamHub(config.streams, files, "benchmark").writer("trainer", "finetune_0", TrainerMessage)
    writer.write(WeightUpdateSuccess(version=0, time=time.time(), seconds={}, num_servers=1))
    writer.close()
    env = {**os.environ, TOKEN_KEY: TOKEN, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **options.environ}
    argv = [sys.executable, "-m", "pipelinerl.actor.main", "--run-dir", str(files.root), "--job", "actor_0"]
    with (folder / "stderr.log").open("wb") as stderr:
        return subprocess.Popen(argv, env=env, stderr=stderr)


def wait_for_rollouts(url: str, actor: subprocess.Popen[bytes], folder: Path) -> None:
    before, deadline = count(url), time.monotonic() + 120
    while count(url) < before + 1000:
        if actor.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the actor made no rollouts:\n{(folder / 'stderr.log').read_text()[-4000:]}")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    parser.add_argument("--warmup-s", type=float, default=3.0)
    parser.add_argument("--concurrent", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--answers", choices=("fast", "json"), default="fast", help="form of the stub's answers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--role", choices=("all", "stub", "plain", "plain-logprobs"), default="all", help=argparse.SUPPRESS
    )
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.environ = {}
    if options.role == "stub":
        serve(options.output_tokens, options.answers)
    elif options.role != "all":
        plain_client(options.url, options.concurrent, options.role == "plain-logprobs")
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    argv = [sys.executable, __file__, "--role", "stub", "--output-tokens", str(options.output_tokens)]
    argv += ["--answers", options.answers]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        stub = psutil.Process(server.pid)
        figures: dict[str, Any] = {
            "concurrent": options.concurrent,
            "output_tokens": options.output_tokens,
            "answers": options.answers,
            "actor": measure_actor(url, stub, options),
            "plain_with_logprobs": measure_plain(url, stub, options, True),
            "plain_text_only": measure_plain(url, stub, options, False),
        }
    finally:
        server.kill()
        server.wait()
    rate = figures["actor"]["rollouts_per_s_per_core"]
    for name in ("plain_with_logprobs", "plain_text_only"):
        figures[f"actor_over_{name}"] = rate / figures[name]["rollouts_per_s_per_core"]
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
