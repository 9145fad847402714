"""Agents that use OpenAI's responses endpoint: token-exact as over chat completions, and errors in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.fake_server import FakeServer
from fakes.scripted_texts import Texts
from transformers import PreTrainedTokenizerFast

from pipelinerl.agents.openai_format import BadRequestError, read_responses_request
from pipelinerl.llm.sample_builder import build_samples

openai = pytest.importorskip("openai")

TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.mark.parametrize("by_id", [False, True])
async def test_t1_a_tool_call_and_its_result_are_one_growing_sample(
    run: Any, by_id: bool, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    texts.left = [CALL, "3"]

    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            ask: Any = client.responses.create
            items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2"}]}]
            options = {"model": "any", "instructions": "Add.", "tools": TOOLS}
            first = await ask(input=items, **options)
            (call,) = first.output
            assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1, "b": 2}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            if by_id:
                second = await ask(input=[result], previous_response_id=first.id, **options)
            else:
                second = await ask(input=[*items, *(each.model_dump() for each in first.output), result], **options)
            assert second.status == "completed" and second.usage.output_tokens == 2
            return float(second.output_text == "3")

    result = await run(agent)
    assert result.metrics.reward == 1.0
    (sample,) = build_samples(result.training_texts, group_id="g", rollout_id="r")
    assert sample.metadata["turns"] == 2
    sampled = [label for label in sample.labels if label != -100]
    assert tokenizer.decode(sampled) == f"{CALL}<|end|>3<|end|>"
    assert tokenizer.decode(sample.input_ids).startswith("<|system|>Add.<|end|><|user|>1 + 2<|end|><|assistant|>")


async def test_streams_and_limits(run: Any, server: FakeServer, texts: Texts) -> None:
    texts.left = ["hello", CALL, "abcdef"]

    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            async with client.responses.stream(model="any", input="hi") as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(deltas) == final.output_text == "hello"
            async with client.responses.stream(model="any", input="hi", tools=TOOLS) as stream:
                final = await stream.get_final_response()
            assert final.output[0].name == "add"
            short = await client.responses.create(model="any", input="hi", max_output_tokens=3)
            assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
        return 1.0

    result = await run(agent)
    assert len(result.training_texts) == 3
    assert server.requests[2]["sampling_params"]["max_tokens"] == 3


async def test_t6_a_full_context_is_told(run: Any, server: FakeServer, texts: Texts) -> None:
    texts.left = ["ok"]

    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await client.responses.create(model="any", input="hi")
            with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
                await client.responses.create(model="any", input="x" * 200)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(model="any", input="x", previous_response_id="resp_1")
        return 1.0

    result = await run(agent, max_model_len=64)
    assert len(result.training_texts) == 1 and len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "object"),
        ({"input": [{"role": "judge", "content": "x"}]}, "judge"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "functions"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "instructions": 7}, "instructions"),
    ],
)
def test_requests_that_cannot_be_served(body: Any, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_responses_request(body)


def test_items_become_messages() -> None:
    """X4: roles as everywhere."""
    request = read_responses_request(
        {
            "input": [
                {"role": "developer", "content": "d"},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": "a"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
            ]
        }
    )
    assert [message["role"] for message in request.messages] == ["developer", "assistant", "tool"]
    assert [call["function"]["name"] for call in request.messages[1]["tool_calls"]] == ["f", "g"]
