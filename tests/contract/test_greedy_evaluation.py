"""`test_llm.parameters.temperature=0` against the real server: evaluations are greedy, concurrent training is not."""

from __future__ import annotations

import asyncio

import pytest
from fakes.random_model import random_ids, random_model
from fakes.updated_server import publish
from fakes.vllm_process import VLLMProcess

from pipelinerl.actor.worker import make_llm
from pipelinerl.config import RunConfig
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import complete, open_session
from pipelinerl.llm.tokens import ChatRenderer
from pipelinerl.records.completion import Completion
from pipelinerl.role import TOKEN_KEY

SEEDS = (1, 2, 3)


async def completions(config: RunConfig, url: str) -> dict[bool, list[Completion]]:
    """Answers to one prompt with several seeds, all at the same time: of evaluation (True) and of training (False)."""
    prompt = random_ids(12, seed=1)

    def handle(evaluation_set: int | None) -> TrainableLLM:
        return make_llm(config, url, ChatRenderer(None), evaluation_set)

    async with open_session() as session:
        pairs = [
            (
                evaluation,
                complete(handle(0 if evaluation else None).for_rollout(seed), prompt, session),
            )
            for evaluation in (True, False)
            for seed in SEEDS
        ]
        answers = await asyncio.gather(*(request for _, request in pairs))
    return {
        kind: [answer for (own, _), answer in zip(pairs, answers, strict=True) if own == kind] for kind in (True, False)
    }


def test_greedy_evaluation_during_sampled_training(tiny_server: VLLMProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_KEY, tiny_server.token)
    publish(tiny_server, 0, random_model())
    sampling = {"max_tokens": 16, "ignore_eos": True}
    config = RunConfig.model_validate(
        {
            "output_dir": "x",
            "llm": {"parameters": sampling},
            "test_llm": {"parameters": {**sampling, "temperature": 0}},
        }
    )
    found = asyncio.run(completions(config, tiny_server.url))
    greedy, sampled = found[True], found[False]
    # Whatever the seed: nothing is drawn, and no log-probs are asked for.
    assert len({tuple(answer.token_ids) for answer in greedy}) == 1
    assert all(answer.logprobs == [] for answer in greedy)
    assert len({tuple(answer.token_ids) for answer in sampled}) == len(SEEDS)
    assert all(len(answer.logprobs) == 16 for answer in sampled)
