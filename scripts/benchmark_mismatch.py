"""How far the trainer's log-probs are from those that the server sampled with, by the trainer's numerics.

    python scripts/benchmark_mismatch.py --model FOLDER --device cuda --dtypes bfloat16 float16 --heads fp32
    python scripts/benchmark_mismatch.py --model FOLDER --url URL --token TOKEN --heads fp32    # a running server

The server samples chat answers at temperature 1; every variant of the trainer scores exactly those tokens. What one
variant or one server fails with stands in its place in the results. On a CPU it is a rehearsal: TF32 is fp32 there.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import torch
from benchmark_common import Server, client_session, generate, make_parser, running_server, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.config import RunConfig
from pipelinerl.errors import PipelineRLError
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.weights.link import ControlClient, control_session

TOPICS = ("the sea", "prime numbers", "a train that is late", "how bread is made", "the moon", "sorting a list")
UNUSABLE_NATS = 1000.0
Sample = tuple[list[int], list[int], list[float]]
Scorer = Callable[[list[int]], torch.Tensor]


async def sample(server: Server, prompts: list[list[int]], max_tokens: int) -> list[Sample]:
    """(prompt, output, log-probs of the output) of one answer to each prompt."""

    async def one(number: int, ids: list[int]) -> Sample:
        choice = await generate(session, server, ids, max_tokens, ignore_eos=False, seed=number)
        return ids, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    async with client_session() as session:
        return list(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts))))


def policy_scorer(model: str, device: torch.device, **settings: Any) -> Scorer:
    """The trainer's own forward pass."""
    fp32_head = settings.pop("fp32_head", True)
    finetune = {"gradient_checkpointing": False, **settings}
    config = RunConfig(output_dir="unused", model_path=model, fp32_lm_head=fp32_head, finetune=finetune)
    policy = load_policy(config, device)

    def score(ids: list[int]) -> torch.Tensor:
        batch = token_batch([ids], torch.device("cpu"))
        layout = policy.layout_of(batch)
        outputs = policy(batch.to(device), layout.to(device) if layout is not None else None, 1.0)
        return outputs.logprobs[0][:-1]

    return score


def half_scorer(model: str, device: torch.device) -> Scorer:
    """Every parameter in bf16, as sharded backends compute; fp32 head."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()

    def score(ids: list[int]) -> torch.Tensor:
        row = torch.tensor([ids], device=device)
        hidden = network.base_model(row)[0][0]
        logits = hidden.float() @ network.get_output_embeddings().weight.float().T
        return torch.log_softmax(logits, -1)[:-1].gather(1, row[0, 1:, None])[:, 0]

    return score


#: The trainer's numerics by name. TF32 keeps its head and its positions exact.
VARIANTS: dict[str, Callable[[str, torch.device], Scorer]] = {
    "trainer, fp32": partial(policy_scorer, dtype="fp32"),
    "trainer, tf32": partial(policy_scorer, dtype="tf32"),
    "trainer, bf16": partial(policy_scorer, dtype="bf16"),
    "trainer, bf16, bf16 head": partial(policy_scorer, dtype="bf16", fp32_head=False),
    "all parameters bf16, fp32 head": half_scorer,
}


@torch.no_grad()
def difference(score: Scorer, samples: list[Sample]) -> dict[str, float]:
    """|log-prob difference| in nats over all output tokens; k3 is mean(r - 1 - log r) of r = p_trainer / p_server.

    Tokens without a usable log-prob (vLLM writes NaN as -9999) are counted and left out.
    """
    gaps: list[float] = []
    for prompt, output, logprobs in samples:
        ours = score([*prompt, *output])[len(prompt) - 1 :].float().cpu()
        gaps += (ours - torch.tensor(logprobs)).tolist()
    num_tokens = len(gaps)
    gaps = [gap for gap in gaps if abs(gap) < UNUSABLE_NATS]
    if not gaps:
        raise ValueError(f"none of {num_tokens} tokens has a usable log-prob")
    row = torch.tensor(gaps, dtype=torch.float64)
    ordered = sorted(row.abs().tolist())
    return {
        "mean_abs": statistics.fmean(ordered),
        "p99_abs": ordered[int(0.99 * (len(ordered) - 1))],
        "max_abs": ordered[-1],
        "k3": float((row.exp() - 1 - row).mean()),
        "tokens": len(ordered),
        "unusable": num_tokens - len(ordered),
    }


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Token ids of `count` chat prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for number in range(count):
        text = f"Tell me {number + 2} things about {TOPICS[number % len(TOPICS)]}."
        chat = [{"role": "user", "content": text}]
        words = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(words, add_special_tokens=False))
    return prompts


def compare(server: Server, args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Sample from `server` and fill `results` by variant of the trainer; one that fails leaves its error there."""
    samples = asyncio.run(sample(server, prompts_of(args.model, args.prompts), args.max_tokens))
    for name, make in VARIANTS.items():
        try:
            results[name] = difference(make(args.model, device_of(args)), samples)
        except (RuntimeError, ValueError, PipelineRLError) as error:
            results[name] = failed(error)
        write_result(args.output, {"results": args.results})


def device_of(args: argparse.Namespace) -> torch.device:
    return torch.device(args.device, args.gpu) if args.device == "cuda" else torch.device("cpu")


async def dtype_of(server: Server) -> str:
    """The server's own name of its dtype."""
    async with control_session(server.token) as session:
        return str((await ControlClient(session, "server", server.url).worker_call("pipelinerl_model_info"))["dtype"])


def measure(server: Server, head: str, args: argparse.Namespace) -> None:
    """All variants of the trainer against one server, under the name of what it is."""
    name = f"server in {asyncio.run(dtype_of(server))}, {head} head"
    compare(server, args, args.results.setdefault(name, {}))


def own_server(dtype: str, head: str, args: argparse.Namespace) -> None:
    """`measure` with a server of its own; one that does not start leaves its error in the results."""
    kwargs: dict[str, object] = {"max_model_len": 1024, "enforce-eager": "", "dtype": dtype}
    if args.device == "cuda":
        kwargs["gpu_memory_utilization"] = 0.3
    words = ["--fp32-head"] if head == "fp32" else []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch) / "server.log"
            with running_server(args.model, args.device, args.server_gpu, kwargs, log, words) as server:
                measure(server, head, args)
    except (RuntimeError, ValueError, OSError, TimeoutError, aiohttp.ClientError, PipelineRLError) as error:
        args.results.setdefault(f"server in {dtype}, {head} head", {})["server"] = failed(error)
        write_result(args.output, {"results": args.results})


def failed(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {str(error)[-1500:]}"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", type=int, default=0, help="of the trainer's side")
    parser.add_argument("--server-gpu", default="0")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--heads", nargs="*", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="bf16: no fp32")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtypes", nargs="*", choices=dtypes, default=["bfloat16"], help="of the servers it starts")
    parser.add_argument("--url", help="a running server; give --heads as it was started")
    parser.add_argument("--token")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.results = {}
    if args.url:
        measure(Server(args.url, args.token, 0.0), args.heads[0], args)
    else:
        for dtype in args.dtypes:
            for head in args.heads:
                own_server(dtype, head, args)
    if any("error" in result for variants in args.results.values() for result in variants.values()):
        sys.exit('some variants failed: see "error" in the results')


if __name__ == "__main__":
    main()
