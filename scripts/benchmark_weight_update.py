"""Seconds of a weight update by phase, under load, against what the wire alone would take; then the log-prob probe.

    python scripts/benchmark_weight_update.py --device cuda --sizes 0.13 0.5 1.5     # two GPUs
    python scripts/benchmark_weight_update.py --sizes 0.001                          # CPU

The server runs on one GPU, the sender on another. `paused` is the sum of the phases from the pause to the end of the
resume. Floor: the same bytes copied from one card to the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from benchmark_common import (
    GRAPHS,
    Server,
    client_session,
    generate,
    random_model,
    running_server,
    visible_gpus,
    write_result,
)
from transformers import AutoModelForCausalLM

from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.source import ModuleSource
from pipelinerl.weights.sync import PHASES, WeightPublisher
from pipelinerl.weights.verify import ProbeSequence


class Load:
    """`concurrency` requests at a time until `stop`, from a thread of its own; counts tokens and mixed sequences."""

    def __init__(self, server: Server, concurrency: int, max_tokens: int) -> None:
        self.tokens = 0
        self.multi_version = 0
        self.errors: list[str] = []
        self._server = server
        self._concurrency = concurrency
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)

    async def _run(self) -> None:
        async with client_session() as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self._concurrency)))

    async def _client(self, session: Any, number: int) -> None:
        ids = [(number * 31 + 7 * k) % 400 + 5 for k in range(16)]
        while not self._stop.is_set():
            try:
                choice = await generate(session, self._server, ids, self._max_tokens)
            except Exception as error:  # noqa: BLE001 - the benchmark reports it
                self.errors.append(repr(error))
                return
            self.tokens += len(choice["token_ids"])
            self.multi_version += len(choice.get("weight_versions") or []) > 1


def floor_s(num_bytes: int, sender: int, receiver: int) -> float | None:
    """Seconds to copy so many bytes from one GPU to the other; the best of five."""
    if torch.cuda.device_count() < 2:
        return None
    source = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", sender))
    target = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", receiver))
    times = []
    for _ in range(5):
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def probe(publisher: WeightPublisher, model: torch.nn.Module, vocabulary: int) -> dict[str, float]:
    """Mean and largest |log-prob difference| of server and sender on random ids, with an fp32 head on both sides."""
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for _ in range(4):
        ids = torch.randint(3, vocabulary, (200,), generator=generator)
        on_device = ids.to(next(model.parameters()).device)
        hidden = model.base_model(on_device[None])[0][0]
        logits = hidden.float() @ model.get_output_embeddings().weight.float().T
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, on_device[1:, None])[:, 0]
        sequences.append(ProbeSequence(ids.tolist(), logprobs.tolist()))
    result = publisher.probe(sequences)
    return {"mean_abs_diff": result.mean_abs_diff, "max_abs_diff": result.max_abs_diff}


def measure(server: Server, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Updates of one running server."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.device == "cuda":
        torch.cuda.set_device(args.sender_gpu)
    device = torch.device("cuda", args.sender_gpu) if args.device == "cuda" else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    vocabulary = model.config.vocab_size
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    transport = transport_of(args)
    source = ModuleSource(model)
    rounds: list[dict[str, float]] = []
    with WeightPublisher(server.token, transport=transport, timeout_s=60) as publisher:
        publisher.connect([ServerAddress("server", server.url)])
        # The first update warms up.
        for _ in range(2):
            publisher.publish(0, source)
        before = probe(publisher, model, vocabulary)
        load = Load(server, args.concurrency, args.max_tokens)
        time.sleep(args.warm_up_s)
        for version in range(1, args.repeats + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0 + 0.002 * (1 if version % 2 else -1))
            report = publisher.publish(version, source)
            if report.failed:
                raise RuntimeError(str(report.failed))
            rounds.append(report.seconds)
            time.sleep(args.pause_between_s)
        load.stop()
        after = probe(publisher, model, vocabulary)
    for seconds in rounds:
        seconds["paused"] = sum(seconds[phase] for phase in PHASES)
    table = {}
    for phase in (*PHASES, "paused", "total"):
        values = [seconds[phase] for seconds in rounds]
        table[phase] = {"median": statistics.median(values), "range": [min(values), max(values)], "values": values}
    result = {"bytes": num_bytes, "rounds": len(rounds), "seconds": table, "probe_before": before, "probe_after": after}
    result |= {"tokens": load.tokens, "multi_version_sequences": load.multi_version, "errors": load.errors[:3]}
    if max(before["mean_abs_diff"], after["mean_abs_diff"]) > 0.1:
        result["void"] = "the server does not compute with what was sent: these seconds are of no update"
    return result | {"floor_s": floor_s(num_bytes, args.sender_gpu, args.server_gpu)}


def transport_of(args: argparse.Namespace) -> str:
    """Two processes on one GPU share memory."""
    if args.device == "cpu":
        return "gloo"
    return "ipc" if args.sender_gpu == args.server_gpu else "nccl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="*", default=["0.001"], help="billions of random parameters")
    parser.add_argument("--model", help="a model folder instead of random ones")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--pause-between-s", type=float, default=0.7)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: a quicker start, slower generation")
    parser.add_argument("--graphs", choices=sorted(GRAPHS), default="decode", help="which CUDA graphs, if any")
    parser.add_argument("--layerwise", action="store_true", help="load layer by layer, not in place")
    parser.add_argument("--server-gpu", type=int, default=0)
    parser.add_argument("--sender-gpu", type=int, default=1)
    parser.add_argument("--url", help="a server that is already running with --model")
    parser.add_argument("--token")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    kwargs: dict[str, object] = {"max_model_len": 1024, "max_num_seqs": 256}
    if args.device == "cpu":
        kwargs |= {"enforce-eager": "", "block_size": 32, "max_num_seqs": 64}
    else:
        kwargs |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv-cache-memory-bytes": 4 << 30}
        kwargs |= {"enforce-eager": ""} if args.eager else {"compilation-config": GRAPHS[args.graphs]}
    environ = {}
    if args.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(str(args.server_gpu), os.environ.get("CUDA_VISIBLE_DEVICES"))
    environ |= {"PIPELINERL_IN_PLACE_RELOAD": "0"} if args.layerwise else {}
    with tempfile.TemporaryDirectory() as scratch:
        for size in [args.model] if args.model else args.sizes:
            dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
            folder = size if args.model else str(random_model(size, Path(scratch) / size, dtype))
            if args.url:
                results[size] = measure(Server(args.url, args.token, 0.0), folder, args)
            else:
                with running_server(
                    folder, transport_of(args), kwargs, Path(scratch) / "server.log", environ=environ
                ) as server:
                    results[size] = measure(server, folder, args) | {"server_start_s": server.start_s}
            write_result(args.output, {"concurrency": args.concurrency, "results": results})


if __name__ == "__main__":
    main()
