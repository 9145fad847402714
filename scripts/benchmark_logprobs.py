"""Chunked log-probs against the plain path: peak memory, time and gradient error.

    python scripts/benchmark_logprobs.py                             # small sizes, CPU
    python scripts/benchmark_logprobs.py --device cuda --tokens 4096 16384 65536

On a GPU the plain path needs about 30 GB at 16k tokens and 152k words. Gradient errors are relative to fp64 on a part
of the rows, also for a plain head whose product is in the inputs' dtype (`plain_own_dtype`). Every row of the table is
the median of the repeats; memory is the peak above what the inputs take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath

import torch

from pipelinerl.rl.logprobs import plain_token_logprobs, token_logprobs

Path = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
PATHS: dict[str, Path] = {"chunked": token_logprobs, "plain": plain_token_logprobs}


def make_inputs(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    return [states, weight, targets]


def step(path: Path, inputs: list[torch.Tensor], entropy: bool) -> None:
    """One forward and backward."""
    states, weight, targets = inputs
    states.grad = weight.grad = None
    logprobs, entropies = path(states, weight, targets, temperature=0.9, with_entropy=entropy)
    loss = logprobs.mean() if entropies is None else logprobs.mean() + 0.01 * entropies.mean()
    loss.backward()


def start_peak(device: str) -> float:
    """Forget the peak so far; returns the MiB in use now."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    # Linux: resets VmHWM, which imports may have driven above what is in use.
    FilePath("/proc/self/clear_refs").write_text("5")
    return status_mib("VmRSS")


def peak_mib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else status_mib("VmHWM")


def status_mib(name: str) -> float:
    lines = FilePath("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(name: str, tokens: int, args: argparse.Namespace) -> dict[str, float | str | int]:
    """Time and memory of one path in this process."""
    dtype = getattr(torch, args.dtype)
    inputs = make_inputs(tokens, args.hidden, args.vocabulary, dtype, args.device)
    # Small first run: libraries, kernels and their workspaces are not what is measured.
    step(PATHS[name], [inputs[0][:8].detach().requires_grad_(), inputs[1], inputs[2][:8]], args.entropy)
    inputs[1].grad = None
    before = start_peak(args.device)
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        step(PATHS[name], inputs, args.entropy)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "path": name,
        "tokens": tokens,
        "seconds": statistics.median(seconds),
        "peak_mib": peak_mib(args.device) - before,
    }


def gradient_errors(args: argparse.Namespace, tokens: int = 256) -> dict[str, float]:
    """Relative error of the gradients of hidden states and head against fp64, for every path."""
    inputs = make_inputs(tokens, args.hidden, min(args.vocabulary, 32768), getattr(torch, args.dtype), args.device)
    exact = [t.detach().double().requires_grad_() for t in inputs[:2]] + [inputs[2]]
    step(plain_token_logprobs, exact, args.entropy)
    errors = {}
    paths = {**PATHS, "plain_own_dtype": partial(plain_token_logprobs, fp32_head=False)}
    for name, path in paths.items():
        step(path, inputs, args.entropy)
        for kind, ours, truth in zip(("hidden", "head"), inputs[:2], exact[:2], strict=True):
            assert ours.grad is not None and truth.grad is not None
            errors[f"{name}/{kind}"] = float((ours.grad.double() - truth.grad).norm() / truth.grad.norm())
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--hidden", type=int, default=None, help="896 on a GPU, 128 on a CPU")
    parser.add_argument("--vocabulary", type=int, default=None, help="151936 on a GPU, 16384 on a CPU")
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16"))
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("PATH", "TOKENS"), help="measure one path and print JSON")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.hidden = args.hidden or (896 if on_gpu else 128)
    args.vocabulary = args.vocabulary or (151936 if on_gpu else 16384)
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args)))
        return 0
    card = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{card}, torch {torch.__version__}, hidden {args.hidden}, vocabulary {args.vocabulary}, {args.dtype}")
    print(f"{'tokens':>8} {'path':>8} {'seconds':>9} {'peak MiB':>9} {'time':>6} {'memory':>7}")
    for tokens in args.tokens:
        rows = {name: _in_a_fresh_process(name, tokens) for name in PATHS}
        plain = rows["plain"]
        for name, row in rows.items():
            if row is None:
                print(f"{tokens:>8} {name:>8}  out of memory")
                continue
            ratios = ""
            if plain is not None:
                ratios = (
                    f"{row['seconds'] / plain['seconds']:>6.2f} {row['peak_mib'] / max(plain['peak_mib'], 1):>7.2f}"
                )
            print(f"{tokens:>8} {name:>8} {row['seconds']:>9.4f} {row['peak_mib']:>9.0f} {ratios}")
    print("gradient error against fp64:", {k: f"{v:.2e}" for k, v in gradient_errors(args).items()})
    return 0


def _in_a_fresh_process(name: str, tokens: int) -> dict[str, float] | None:
    """Peak memory of a process never falls, so every measurement has its own."""
    arguments = [*sys.argv[1:], "--one", name, str(tokens)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        if "out of memory" not in done.stderr.lower():
            raise RuntimeError(f"{name} at {tokens} tokens failed: {last[0]}")
        return None
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
