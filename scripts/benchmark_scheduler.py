"""CPU time of a server's scheduler for each output token: the real asynchronous one with made-up model outputs.

    python scripts/benchmark_scheduler.py [--requests 256] [--max-tokens 256] [--repeats 3]
    python scripts/benchmark_scheduler.py --admission [--wait-steps 0 8 16] [--batch-fractions 0.0625 0.25]

No model is run and no GPU is needed. `update_from_output` includes holding tokens back and joining them again, `encode`
is the message to the API process.

`--admission` counts steps instead: answers have lengths of an exponential distribution, or one in ten is eleven times
as long as the others (`--lengths`), and after a request ends the next one comes in one of the three steps that follow.
For each setting of `vllm_config.admission_*` it says which part of the steps only decodes, how many requests a step
computes on average, and how many steps a request waits. Tokens per second are arithmetic, from the times of both kinds
of steps that are given, not measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_common import random_model, write_result
from benchmark_schedules_task import answer_tokens
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from pipelinerl.inference.admission import BATCH_FRACTION_VARIABLE, WAIT_STEPS_VARIABLE
from pipelinerl.inference.scheduler import EpochAsyncScheduler

BLOCK = 32
PROMPT_TOKENS = 64


def empty_scheduler(config: Any) -> EpochAsyncScheduler:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return EpochAsyncScheduler(config, caches, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def make_request(number: int, max_tokens: int, logprobs: int | None) -> Request:
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, output_kind=kind)
    ids = [(7 * number + k) % 400 + 5 for k in range(PROMPT_TOKENS)]
    return Request(f"request-{number}-0123456789", ids, params, None)


def make_scheduler(config: Any, args: argparse.Namespace, logprobs: int | None) -> EpochAsyncScheduler:
    """A scheduler with all requests waiting."""
    scheduler = empty_scheduler(config)
    for number in range(args.requests):
        scheduler.add_request(make_request(number, args.max_tokens, logprobs))
    return scheduler


def model_output(names: list[str], logprobs: int | None) -> ModelRunnerOutput:
    """What a model runner gives for one token of each request."""
    count = len(names)
    lists = None
    if logprobs is not None and names:
        ids = np.full((count, 1), 7, np.int32)
        lists = LogprobsLists(ids, np.full((count, 1), -0.5, np.float32), np.ones(count, np.int64), None)
    index = {name: position for position, name in enumerate(names)}
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index=index, sampled_token_ids=[[7]] * count, logprobs=lists, prompt_logprobs_dict={}
    )


def one_run(config: Any, args: argparse.Namespace, logprobs: int | None) -> dict[str, float]:
    """CPU microseconds a token of each part, with two steps in flight as in an engine."""
    scheduler = make_scheduler(config, args, logprobs)
    encoder = MsgpackEncoder()
    used = dict.fromkeys(("schedule", "update_from_output", "encode"), 0.0)
    in_flight: deque[Any] = deque()
    while scheduler.has_requests() or in_flight:
        if scheduler.has_requests():
            start = time.process_time()
            in_flight.append(scheduler.schedule())
            used["schedule"] += time.process_time() - start
            if len(in_flight) < 2:
                continue
        scheduled = in_flight.popleft()
        output = model_output(list(scheduled.num_scheduled_tokens), logprobs)
        start = time.process_time()
        batches = scheduler.update_from_output(scheduled, output)
        middle = time.process_time()
        for batch in batches.values():
            encoder.encode(batch)
        used["update_from_output"] += middle - start
        used["encode"] += time.process_time() - middle
    tokens = args.requests * args.max_tokens
    return {part: seconds / tokens * 1e6 for part, seconds in used.items()}


def draw_length(kind: str, mean_tokens: int, longest: int, draws: random.Random) -> int:
    if kind == "two":
        return answer_tokens(mean_tokens, "high", draws.random())
    return min(longest, 1 + int(draws.expovariate(1 / mean_tokens)))


def count_steps(config: Any, args: argparse.Namespace, mean_tokens: int, longest: int) -> dict[str, float]:
    """Kinds of steps, load and waits with `args.requests` clients, over the second half of `args.steps`."""
    scheduler, draws = empty_scheduler(config), random.Random(0)
    came: dict[str, int] = {}
    clients = [0] * args.requests  # step in which each client sends its next request, once it has no other
    mine: dict[str, int] = {}
    waits: list[tuple[int, int]] = []  # step of the start, steps waited
    slow: list[bool] = []
    load: list[int] = []
    in_flight: deque[Any] = deque()
    for step in range(args.steps):
        for client, due in enumerate(clients):
            if due != step:
                continue
            length = draw_length(args.lengths, mean_tokens, longest, draws)
            # The first requests are at any place of their answers, so that they do not all end together.
            length = length if step else draws.randint(1, length)
            request = make_request(len(came), length, 0)
            came[request.request_id], mine[request.request_id] = step, client
            scheduler.add_request(request)
        scheduled = scheduler.schedule()
        in_flight.append(scheduled)
        waits += [(step, step - came[new.req_id]) for new in scheduled.scheduled_new_reqs]
        slow.append(bool(scheduled.scheduled_new_reqs))
        load.append(len(scheduled.num_scheduled_tokens))
        if len(in_flight) == 2:
            done = in_flight.popleft()
            scheduler.update_from_output(done, model_output(list(done.num_scheduled_tokens), 0))
            for name in [name for name in mine if name not in scheduler.requests]:
                clients[mine.pop(name)] = step + draws.randint(1, 3)
    half = args.steps // 2
    waited = [wait for step, wait in waits if step >= half]
    seconds = sum(args.mixed_step_ms if each else args.decode_step_ms for each in slow[half:]) / 1000
    return {
        "decode_only_steps": 1 - statistics.fmean(slow[half:]),
        "requests_a_step": statistics.fmean(load[half:]),
        "starts_a_slow_step": len(waited) / max(1, sum(slow[half:])),
        "waited_steps_mean": statistics.fmean(waited),
        "waited_steps_max": max(waited),
        "tokens_per_s_by_arithmetic": sum(load[half:]) / seconds,
    }


def admission(config: Any, args: argparse.Namespace, longest: int) -> None:
    """`count_steps` of every combination, written after each; without batches the fraction means nothing."""
    settings = {"requests": args.requests, "lengths": args.lengths, "steps": args.steps // 2}
    settings |= {"decode_ms": args.decode_step_ms, "mixed_ms": args.mixed_step_ms}
    found: dict[str, Any] = {}
    for mean_tokens, steps, fraction in itertools.product(args.mean_tokens, args.wait_steps, args.batch_fractions):
        if steps == 0 and fraction != args.batch_fractions[0]:
            continue
        os.environ |= {WAIT_STEPS_VARIABLE: str(steps), BATCH_FRACTION_VARIABLE: str(fraction)}
        name = f"{mean_tokens} tokens, " + (f"wait {steps} steps, fraction {fraction:g}" if steps else "no batches")
        found[name] = count_steps(config, args, mean_tokens, longest)
        write_result(args.output, {"settings": settings, "results": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--admission", action="store_true", help="count steps by settings of vllm_config.admission_*")
    parser.add_argument("--wait-steps", type=int, nargs="*", default=[0, 8, 16])
    parser.add_argument("--batch-fractions", type=float, nargs="*", default=[0.0625])
    parser.add_argument("--mean-tokens", type=int, nargs="*", default=[64, 256], help="of answers, with --admission")
    parser.add_argument("--lengths", choices=("two", "exponential"), default="two")
    parser.add_argument("--steps", type=int, default=4000, help="with --admission; the first half is not counted")
    parser.add_argument("--decode-step-ms", type=float, default=5.5)
    parser.add_argument("--mixed-step-ms", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    longest = max(answer_tokens(mean, "high", 0.0) for mean in args.mean_tokens) if args.admission else args.max_tokens
    with tempfile.TemporaryDirectory() as folder:
        model = random_model("0.001", Path(folder) / "model", torch.float32)
        engine = EngineArgs(
            model=str(model), max_model_len=max(1024, PROMPT_TOKENS + longest), max_num_seqs=args.requests,
            block_size=BLOCK, enable_prefix_caching=False, skip_tokenizer_init=True,
            max_num_batched_tokens=8192 if args.admission else None,
        )  # fmt: skip
        config = engine.create_engine_config()
    config.scheduler_config.async_scheduling = True  # refused on a CPU by the platform, not by the scheduler
    blocks_a_request = (PROMPT_TOKENS + longest) // BLOCK + 2
    config.cache_config.num_gpu_blocks = args.requests * blocks_a_request + 1
    if args.admission:
        admission(config, args, longest)
        return
    runs: dict[str, list[dict[str, float]]] = {"with log-probs": [], "without log-probs": []}
    for _ in range(args.repeats + 1):  # the first one warms up
        for label, logprobs in (("with log-probs", 0), ("without log-probs", None)):
            runs[label].append(one_run(config, args, logprobs))
    medians = {
        label: {part: statistics.median(run[part] for run in found[1:]) for part in found[0]}
        for label, found in runs.items()
    }
    ranges = {
        label: {part: [min(run[part] for run in found[1:]), max(run[part] for run in found[1:])] for part in found[0]}
        for label, found in runs.items()
    }
    write_result(args.output, {"cpu_us_a_token": medians, "ranges": ranges, "repeats": args.repeats})


if __name__ == "__main__":
    main()
