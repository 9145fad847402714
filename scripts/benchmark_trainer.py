"""Tokens per second, MFU and memory of the trainer's step, next to a plain transformers loop in the same process.

    python scripts/benchmark_trainer.py --device cuda --size 0.5 --pack-tokens 4096 16384      # one GPU
    python scripts/benchmark_trainer.py --size 0.001 --pack-tokens 512 --tokens 4096           # CPU

Ours: the step of a run as it is (packed rows, chunked fp32 head, loss, diagnostics, AdamW). Segments: the same without
flash attention. Plain: right-padded rows of the own logits of the model, log-softmax, the same loss and AdamW, with the
most rows that fit into as many tokens. All train on the same samples, whose lengths are drawn, and take turns; only
real tokens count. MFU is 6 x parameters x tokens/s over the dense bf16 peak of the card (--peak-tflops; attention is
left out, as in most published figures).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmark_common import made_sample, make_parser, random_model, spread, write_result
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.optimizer import make_adamw
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.records import IGNORED_LABEL, Sample, TrainingBatch
from pipelinerl.rl.packing import make_plan

Step = Callable[[], object]
Trained = tuple[Step, torch.nn.Module]
OLD_LOGPROB = -1.0  # as `made_sample` gives it


def make_samples(tokens: int, longest: int, vocabulary: int, seed: int) -> list[Sample]:
    """Samples of a quarter of prompt and the rest of output, of 1/8 to all of `longest`, about `tokens` in all."""
    draw = random.Random(seed)
    samples: list[Sample] = []
    total = 0
    while total < tokens:
        length = draw.randint(max(8, longest // 8), longest)
        ids = [draw.randrange(3, vocabulary) for _ in range(length)]
        reward, advantage = draw.random(), draw.uniform(-1, 1)
        name = f"s{len(samples)}/r0/s0"
        samples.append(made_sample(name, ids[: length // 4], ids[length // 4 :], reward=reward, advantage=advantage))
        total += length
    return samples


def our_step(
    model: str,
    samples: list[Sample],
    pack_tokens: int,
    device: torch.device,
    args: Any,
    attention: str = "auto",
) -> Trained:
    """One optimizer step of the plain backend on all samples."""
    finetune = {
        "seq_length": pack_tokens,
        "attn_implementation": attention,
        "gradient_checkpointing": args.checkpointing,
        "logprob_chunk_tokens": args.chunk_tokens,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
    }
    config = RunConfig(output_dir="unused", model_path=model, finetune=finetune)
    ranks = Ranks(device=device)
    policy = load_policy(config, device)
    backend = PlainBackend(policy, config.finetune, ranks)
    runner = StepRunner(backend, config.finetune, ranks)
    lengths = [len(sample.input_ids) for sample in samples]
    plan = make_plan(lengths, 1, pack_tokens, True, 1)
    batch = TrainingBatch(id="b", step=1, samples=samples, group_ids=[], plan=plan, actor_offset=0)
    return lambda: runner.run(batch), policy.language_model


def segments_step(model: str, samples: list[Sample], pack_tokens: int, device: torch.device, args: Any) -> Trained:
    """Ours without flash attention: samples are copied into blocks of similar length for PyTorch's causal kernel."""
    return our_step(model, samples, pack_tokens, device, args, attention="segments")


def plain_step(model: str, samples: list[Sample], pack_tokens: int, device: torch.device, args: Any) -> Trained:
    """The same work as a short loop over transformers would do it."""
    network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).train()
    if args.checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    config = RunConfig(output_dir="unused", model_path=model).finetune
    optimizer = make_adamw(list(network.named_parameters()), config)
    rows = padded_rows(samples, pack_tokens)

    def run() -> None:
        for ids, labels, mask, advantages in rows:
            ids, labels, mask, advantages = (tensor.to(device) for tensor in (ids, labels, mask, advantages))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = network(input_ids=ids, attention_mask=mask, use_cache=False).logits
            logprobs = -F.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
            ).view(len(ids), -1)
            trained = labels[:, 1:] != IGNORED_LABEL
            weights = (logprobs.detach() - OLD_LOGPROB).exp().clamp(max=5.0)
            loss = -(weights * advantages[:, None] * logprobs * trained).sum() / len(samples)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run, network


def padded_rows(samples: Sequence[Sample], pack_tokens: int) -> list[tuple[torch.Tensor, ...]]:
    """Right-padded micro-batches of samples of similar length, each of at most `pack_tokens` with its padding."""
    ordered = sorted(samples, key=lambda sample: -len(sample.input_ids))
    rows = []
    while ordered:
        width = len(ordered[0].input_ids)
        chosen, ordered = ordered[: max(1, pack_tokens // width)], ordered[max(1, pack_tokens // width) :]
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        labels, mask = torch.full_like(ids, IGNORED_LABEL), torch.zeros_like(ids)
        for row, sample in enumerate(chosen):
            length = len(sample.input_ids)
            ids[row, :length] = torch.tensor(sample.input_ids)
            labels[row, :length] = torch.tensor(sample.labels)
            mask[row, :length] = 1
        rows.append((ids, labels, mask, torch.tensor([sample.advantage for sample in chosen])))
    return rows


def measure(step: Step, tokens: int, parameters: int, args: Any) -> dict[str, Any]:
    """Seconds of one call of `step`, and what follows from them."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "tokens/s": tokens / seconds}
    if device.type == "cuda":
        found["mfu"] = 6 * parameters * tokens / seconds / (args.peak_tflops * 1e12)
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def compare(model: str, pack_tokens: int, args: Any) -> dict[str, Any]:
    """All paths in turn on the same samples; medians and ranges.

    Weights and optimizer states of all paths are in memory all the time.
    """
    device = torch.device(args.device)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters, vocabulary = sum(p.numel() for p in network.parameters()), network.config.vocab_size
    del network
    samples = make_samples(args.tokens, min(args.longest, pack_tokens), vocabulary, seed=1)
    tokens = sum(len(sample.input_ids) for sample in samples)
    result: dict[str, Any] = {"parameters": parameters, "samples": len(samples), "tokens": tokens}
    paths = {"ours": our_step, "segments": segments_step, "plain": plain_step}
    steps = {name: paths[name](model, samples, pack_tokens, device, args)[0] for name in args.paths}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    for _ in range(args.repeats + 1):
        for name, step in steps.items():
            try:
                rounds[name].append(measure(step, tokens, parameters, args))
            except torch.OutOfMemoryError:
                result[name] = {"error": "out of memory"}
                torch.cuda.empty_cache()
    for name, found in rounds.items():
        # The first round warms up.
        if name not in result and len(found) > 1:
            result[name] = {key: spread(each[key] for each in found[1:]) for key in found[0]}
    if all("tokens/s" in result.get(name, {}) for name in ("ours", "plain")):
        result["ratio"] = result["ours"]["tokens/s"]["median"] / result["plain"]["tokens/s"]["median"]
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="a folder; default: a random model of --size")
    parser.add_argument("--size", default="0.5", help="billions of parameters: 0.001, 0.13, 0.5 or 1.5")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pack-tokens", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--tokens", type=int, default=131072, help="of one optimizer step, about")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest sample")
    parser.add_argument("--chunk-tokens", type=int, default=4096, help="tokens whose logits exist at once, in ours")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in both")
    parser.add_argument("--paths", nargs="*", choices=("ours", "segments", "plain"), default=["ours", "plain"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of the card (H100, H200)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or str(random_model(args.size, Path(scratch) / "model", torch.float32))
        for pack_tokens in args.pack_tokens:
            results[f"packs of {pack_tokens} tokens"] = compare(model, pack_tokens, args)
            settings = {key: value for key, value in vars(args).items() if key != "output"}
            write_result(args.output, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
