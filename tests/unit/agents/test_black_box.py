"""Agents behind the OpenAI endpoint: what they see, what is recorded, and what becomes of errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fakes.fake_server import FakeServer, Fault
from fakes.scripted_texts import Texts
from transformers import PreTrainedTokenizerFast

from pipelinerl.agents import black_box
from pipelinerl.agents.openai_format import BadRequestError, read_chat_request
from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError
from pipelinerl.llm.sample_builder import build_samples
from pipelinerl.llm.tokens import ChatRenderer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def post(base_url: str, key: str, session: aiohttp.ClientSession, **body: Any) -> Any:
    return session.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


async def test_an_openai_client_with_a_tool_is_one_token_exact_sample(
    run: Any, server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    openai = pytest.importorskip("openai")
    texts.left = [CALL, "3"]

    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": problem["q"]}]
            first = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0)
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls" and message.content is None
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            assert second.usage.completion_tokens == 2 and second.choices[0].finish_reason == "stop"
            return float(second.choices[0].message.content == "3"), {"asked": 2}

    result = await run(agent)
    (text,) = result.training_texts
    encode = tokenizer.encode
    first = encode("<|user|>1 + 2<|end|><|assistant|>") + texts.ids(CALL)
    assert text.input_ids == first + encode("<|tool|>3<|end|><|assistant|>") + texts.ids("3")
    assert [label for label in text.labels if label != -100] == texts.ids(CALL) + texts.ids("3")
    assert text.reward == 1.0 and text.temperature == 0.7
    assert result.metrics.model_dump()["asked"] == 2 and result.metrics.model_dump()["requests"] == 2
    assert {request["sampling_params"]["temperature"] for request in server.requests} == {0.7}
    build_samples(result.training_texts, group_id="g", rollout_id="r")


async def test_a_blocking_agent_that_raises_stop_iteration_fails_at_once(run: Any) -> None:
    def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        return float(next(iter([])))

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        async with asyncio.timeout(60):
            await run(agent)


async def test_a_blocking_agent_and_streams(run: Any, texts: Texts) -> None:
    openai = pytest.importorskip("openai")
    texts.left = ["12", CALL]

    def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": [{"type": "text", "text": problem["q"]}]}]
            options: Any = {"model": "any", "stream": True, "stream_options": {"include_usage": True}}
            events = list(client.chat.completions.create(messages=messages, **options))
            assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "12"
            assert events[-1].usage.completion_tokens == 3
            messages += [{"role": "assistant", "content": "12"}, {"role": "user", "content": "and?"}]
            events = list(client.chat.completions.create(messages=messages, tools=TOOLS, **options))
            assert events[0].choices[0].delta.tool_calls[0].function.name == "add"
            assert events[1].choices[0].finish_reason == "tool_calls"
            assert [model.id for model in client.models.list()] == ["actor"]
        return 1

    result = await run(agent)
    # Other tools: the template may write another beginning, so it is another conversation.
    assert [text.metadata["turns"] for text in result.training_texts] == [1, 1]


async def test_requests_at_once_and_rewritten_contexts_are_samples_of_their_own(run: Any) -> None:
    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with aiohttp.ClientSession() as session:

            async def ask(*contents: str) -> str:
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
                async with post(base_url, api_key, session, messages=messages) as response:
                    return (await response.json())["choices"][0]["message"]["content"]

            assert await asyncio.gather(*(ask("same") for _ in range(3))) == ["12"] * 3
            await ask("same", "12", "go on")
            await ask("same", "another answer", "go on")
        return 0.5

    result = await run(agent)
    assert sorted(text.metadata["turns"] for text in result.training_texts) == [1, 1, 1, 2]
    assert {text.reward for text in result.training_texts} == {0.5}


async def test_limits_of_the_agent_are_kept_within_those_of_the_run(run: Any, server: FakeServer) -> None:
    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with aiohttp.ClientSession() as session:
            for limits in ({"max_tokens": 5000}, {"max_completion_tokens": 2, "stop": "x"}):
                messages = [{"role": "user", "content": "q"}]
                async with post(base_url, api_key, session, messages=messages, **limits) as response:
                    choice = (await response.json())["choices"][0]
            assert choice["finish_reason"] == "length"
        return 0

    await run(agent)
    first, second = (request["sampling_params"] for request in server.requests)
    assert first["max_tokens"] == 100 and second["max_tokens"] == 2 and second["stop"] == ["x"]


async def test_arguments_of_the_chat_template_reach_every_turn(
    run: Any, server: FakeServer, texts: Any, tokenizer: Any
) -> None:
    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        messages = [{"role": "user", "content": "q"}]
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with post(base_url, api_key, session, messages=messages) as response:
                    said = (await response.json())["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "r"}]
        return 0

    template = "{% for m in messages %}({{ m.content }}){% if m.role == 'assistant' %}{{ eos_token }}{% endif %}" + (
        "{% endfor %}{% if add_generation_prompt and not enable_thinking %}!{% endif %}"
    )
    await run(agent, renderer=ChatRenderer(tokenizer, {"chat_template": template, "enable_thinking": False}))
    first, second = (request["token_ids"] for request in server.requests)
    assert first == texts.ids("(q)!")[:-1]
    assert second[-4:] == texts.ids("(r)!")[:-1]


async def test_a_full_context_is_told_in_openais_words_and_the_turns_before_are_kept(run: Any) -> None:
    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with aiohttp.ClientSession() as session:
            messages = [{"role": "user", "content": "x" * 20}]
            while True:
                async with post(base_url, api_key, session, messages=messages) as response:
                    body = await response.json()
                    if response.status == 400:
                        assert body["error"]["code"] == "context_length_exceeded"
                        return -1
                messages += [body["choices"][0]["message"], {"role": "user", "content": "x" * 20}]

    result = await run(agent, max_model_len=64)
    assert [text.metadata["turns"] for text in result.training_texts] == [2]
    assert result.training_texts[0].reward == -1


async def test_keys_are_secrets_of_one_rollout(run: Any, server: FakeServer) -> None:
    seen = []

    async def agent(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        async with aiohttp.ClientSession() as session:
            for key in (*seen, "sk-wrong"):
                async with post(base_url, key, session, messages=[{"role": "user", "content": "q"}]) as response:
                    assert response.status == 401
            seen.append(api_key)
            async with post(base_url, api_key, session, messages=[{"role": "user", "content": "q"}]) as response:
                assert response.status == 200
            async with post(base_url, api_key, session, messages=[]) as response:
                assert response.status == 400
        return 1

    box = black_box(agent)
    await run(box)
    await run(box)
    assert len(set(seen)) == 2 and server.token not in seen


async def test_a_server_that_fails_fails_the_rollout_even_if_the_agent_goes_on(run: Any, server: FakeServer) -> None:
    async def careless(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        messages = [{"role": "user", "content": "q"}]
        async with aiohttp.ClientSession() as session, post(base_url, api_key, session, messages=messages) as response:
            assert response.status == 503
        return 1

    async def raises(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
        messages = [{"role": "user", "content": "q"}]
        async with aiohttp.ClientSession() as session, post(base_url, api_key, session, messages=messages) as response:
            response.raise_for_status()
        return 1

    for agent in (careless, raises):
        server.inject("/inference/v1/generate", Fault("status", 500))
        with pytest.raises(RetryableRolloutError, match="http_500"):
            await run(agent)


async def nothing_asked(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
    return 1


async def no_return(base_url: str, api_key: str, problem: dict[str, Any]) -> None: ...


async def not_a_number(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
    return float("nan")


async def breaks(base_url: str, api_key: str, problem: dict[str, Any]) -> float:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("agent", "error", "words"),
    [
        (nothing_asked, RolloutError, "no_request"),
        (no_return, DomainError, "Is a `return` missing"),
        (not_a_number, RolloutError, "bad_reward"),
        (breaks, KeyError, "mine"),
    ],
)
async def test_errors_of_agents(run: Any, agent: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        await run(agent)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"messages": []},
        {"messages": ["x"]},
        {"messages": [{"role": "user"}], "n": 2},
        {"messages": [{"role": "user"}], "tools": "x"},
        {"messages": [{"role": "user"}], "max_tokens": "x"},
        {"messages": [{"role": "user"}], "max_tokens": 0},
        {"messages": [{"role": "user"}], "stop": [1]},
        {"messages": [{"role": "user"}], "stop": ["x"] * 17},
    ],
)
def test_requests_that_cannot_be_served(body: Any) -> None:
    with pytest.raises(BadRequestError):
        read_chat_request(body)
