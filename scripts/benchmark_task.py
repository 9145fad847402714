"""The task of `benchmark_runs.py`: begin the answer with an even token. Lengths are drawn, so they can vary.

Easy to learn for any model and vocabulary, and the length of an answer has nothing to do with its reward: what differs
between two runs is the schedule alone.
"""

from __future__ import annotations

import random
import time
from typing import Any

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult

#: High variance: one answer in ten is eleven times as long as the others; the mean stays what was asked for.
LONG_SHARE, SHORT_PART, LONG_PART = 0.1, 0.5, 5.5


def load_problems(dataset_names: list[str]) -> list[dict[str, Any]]:
    return [{"dataset": name, "word": index} for name in dataset_names for index in range(64)]


async def generate_rollout(cfg: Any, llm: Any, problem: dict[str, Any], session: Any) -> RolloutResult:
    started = time.time()
    if problem["dataset"] == "train":
        length = answer_tokens(int(cfg.custom.mean_tokens), str(cfg.custom.variance), random.random())
        llm.parameters.update(max_tokens=length, ignore_eos=True)
    else:
        llm.parameters.update(max_tokens=1)
    messages = [{"role": "user", "content": f"Say something about {problem['word']}"}]
    call = await llm_async_generate(llm, Prompt(messages=messages), session)
    text = make_training_text(llm, call)
    text.reward = float(call.output_token_ids[0] % 2 == 0)
    metrics = BaseMetrics(reward=text.reward, success=bool(text.reward), no_error=True, no_answer=False)
    return RolloutResult(
        training_texts=[text], metrics=metrics, latency=time.time() - started, dataset_name=problem["dataset"]
    )


def answer_tokens(mean_tokens: int, variance: str, draw: float) -> int:
    """Tokens of one answer for a uniform `draw` in [0, 1)."""
    if variance == "low":
        return mean_tokens
    part = LONG_PART if draw < LONG_SHARE else SHORT_PART
    return max(1, round(part * mean_tokens))
