"""Agent loops of other packages, unchanged, behind the OpenAI endpoint (extra `agents`; skipped without them)."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.fake_server import FakeServer
from fakes.scripted_texts import Texts
from transformers import PreTrainedTokenizerFast

from pipelinerl.llm.sample_builder import build_samples

ADD = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'


PROBLEM = {"question": "What is 17 + 25?", "answer": "42"}


async def test_pydantic_ai_is_one_growing_sample(
    run: Any, server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pip install pydantic-ai-slim[openai]")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    texts.left = [ADD, "It is 42"]

    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        model = OpenAIChatModel("actor", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
        solver: Any = pydantic_ai.Agent(model, instructions="Use the tool.")

        @solver.tool_plain
        def add(a: int, b: int) -> int:
            return a + b

        result = await solver.run(problem["question"])
        return float(problem["answer"] in result.output)

    result = await run(agent, PROBLEM, parameters={"max_tokens": 400})
    assert result.metrics.reward == 1.0
    (text,) = result.training_texts
    assert text.metadata["turns"] == 2
    sampled = [label for label in text.labels if label != -100]
    assert tokenizer.decode(sampled) == ADD + "<|end|>" + "It is 42<|end|>"
    assert text.input_ids[: len(server.requests[1]["token_ids"])] == server.requests[1]["token_ids"]
    assert "<|tool|>42<|end|><|assistant|>" in tokenizer.decode(text.input_ids)
    build_samples(result.training_texts, group_id="g", rollout_id="r")


async def test_smolagents_rewrites_its_context_and_gets_a_sample_for_each_call(
    run: Any, server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    smolagents = pytest.importorskip("smolagents", reason="pip install smolagents")
    texts.left = [ADD, '<tool_call>{"name": "final_answer", "arguments": {"answer": "42"}}</tool_call>']

    def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        @smolagents.tool
        def add(a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: the first
                b: the second
            """
            return a + b

        model = smolagents.OpenAIModel(model_id="actor", api_base=base_url, api_key=api_key)
        solver = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
        return float(str(solver.run(problem["question"])) == problem["answer"])

    result = await run(agent, PROBLEM, parameters={"max_tokens": 400})
    assert result.metrics.reward == 1.0
    assert [text.reward for text in result.training_texts] == [1.0, 1.0]
    assert "17" in tokenizer.decode(server.requests[1]["token_ids"]), "the second prompt tells of the first call"
    build_samples(result.training_texts, group_id="g", rollout_id="r")
