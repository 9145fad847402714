"""How far the trainer's log-probs are from those that the server sampled with, by the trainer's numerics.

    python scripts/benchmark_mismatch.py --model FOLDER --device cuda                # starts servers, fp32 head and not
    python scripts/benchmark_mismatch.py --model FOLDER --url URL --token TOKEN      # against a running server

The server samples chat answers at temperature 1; every variant of the trainer scores exactly those tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark_common import Server, client_session, generate, running_server, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.config import RunConfig
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.packing_check import token_batch

TOPICS = ("the sea", "prime numbers", "a train that is late", "how bread is made", "the moon", "sorting a list")
Sample = tuple[list[int], list[int], list[float]]
Scorer = Callable[[list[int]], torch.Tensor]


async def sample(server: Server, prompts: list[list[int]], max_tokens: int) -> list[Sample]:
    """(prompt, output, log-probs of the output) of one answer to each prompt."""

    async def one(number: int, ids: list[int]) -> Sample:
        choice = await generate(session, server, ids, max_tokens, ignore_eos=False, seed=number)
        return ids, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    async with client_session() as session:
        return list(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts))))


def policy_scorer(model: str, device: torch.device, **settings: Any) -> tuple[Scorer, torch.nn.Module]:
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

    return score, policy


def half_scorer(model: str, device: torch.device) -> Scorer:
    """Every parameter in bf16, as sharded backends compute; fp32 head."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()

    def score(ids: list[int]) -> torch.Tensor:
        row = torch.tensor([ids], device=device)
        hidden = network.base_model(row)[0][0]
        logits = hidden.float() @ network.get_output_embeddings().weight.float().T
        return torch.log_softmax(logits, -1)[:-1].gather(1, row[0, 1:, None])[:, 0]

    return score


@torch.no_grad()
def difference(score: Scorer, samples: list[Sample]) -> dict[str, float]:
    """|log-prob difference| in nats over all output tokens; k3 is mean(r - 1 - log r) of r = p_trainer / p_server."""
    gaps: list[float] = []
    for prompt, output, logprobs in samples:
        ours = score([*prompt, *output])[len(prompt) - 1 :].float().cpu()
        gaps += (ours - torch.tensor(logprobs)).tolist()
    row = torch.tensor(gaps, dtype=torch.float64)
    ordered = sorted(row.abs().tolist())
    return {
        "mean_abs": statistics.fmean(ordered),
        "p99_abs": ordered[int(0.99 * (len(ordered) - 1))],
        "max_abs": ordered[-1],
        "k3": float((row.exp() - 1 - row).mean()),
        "tokens": len(ordered),
    }


def compare(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = []
    for number in range(args.prompts):
        text = f"Tell me {number + 2} things about {TOPICS[number % len(TOPICS)]}."
        chat = [{"role": "user", "content": text}]
        words = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(words, add_special_tokens=False))
    samples = asyncio.run(sample(server, prompts, args.max_tokens))
    device = torch.device(args.device, args.gpu) if args.device == "cuda" else torch.device("cpu")
    results = {}
    for name, settings in {
        "trainer, bf16": {"dtype": "bf16"},
        "trainer, bf16, bf16 head": {"dtype": "bf16", "fp32_head": False},
        "trainer, fp32": {"dtype": "fp32"},
    }.items():
        score, _ = policy_scorer(args.model, device, **settings)
        results[name] = difference(score, samples)
    results["all parameters bf16, fp32 head"] = difference(half_scorer(args.model, device), samples)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", type=int, default=0, help="of the trainer's side")
    parser.add_argument("--server-gpu", default="0")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--heads", nargs="*", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--url")
    parser.add_argument("--token")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    kwargs: dict[str, object] = {"max_model_len": 1024, "enforce-eager": "", "dtype": "bfloat16"}
    kwargs |= {"block_size": 32} if args.device == "cpu" else {"gpu_memory_utilization": 0.3}
    results: dict[str, Any] = {}
    for head in args.heads:
        if args.url:
            results[f"server with {head} head"] = compare(Server(args.url, args.token, 0.0), args)
        else:
            transport = "nccl" if args.device == "cuda" else "gloo"
            environ = {"CUDA_VISIBLE_DEVICES": args.server_gpu}
            with tempfile.TemporaryDirectory() as scratch:
                log = Path(scratch) / "server.log"
                with running_server(args.model, transport, kwargs, log, head == "fp32", environ) as server:
                    results[f"server with {head} head"] = compare(server, args)
        write_result(args.output, {"results": results})


if __name__ == "__main__":
    main()
