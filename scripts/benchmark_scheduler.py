"""CPU time of a server's scheduler for each output token: the real asynchronous one with made-up model outputs.

    python scripts/benchmark_scheduler.py [--requests 256] [--max-tokens 256] [--repeats 3]

No model is run and no GPU is needed. `update_from_output` includes holding tokens back and joining them again, `encode`
is the message to the API process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_common import random_model, write_result
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model("0.001", Path(folder) / "model", torch.float32)
        engine = EngineArgs(
            model=str(model), max_model_len=max(1024, PROMPT_TOKENS + args.max_tokens), max_num_seqs=args.requests,
            block_size=BLOCK, enable_prefix_caching=False, skip_tokenizer_init=True,
        )  # fmt: skip
        config = engine.create_engine_config()
    config.scheduler_config.async_scheduling = True  # refused on a CPU by the platform, not by the scheduler
    blocks_a_request = (PROMPT_TOKENS + args.max_tokens) // BLOCK + 2
    config.cache_config.num_gpu_blocks = args.requests * blocks_a_request + 1
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
