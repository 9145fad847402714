"""T1, T5, T6, T8, M5: several turns as one growing token sequence, with several kinds of chat templates."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_server import FakeServer
from fakes.scripted_texts import chat_tokenizer
from transformers import PreTrainedTokenizerFast

from pipelinerl.errors import RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.chat import Chat
from pipelinerl.llm.client import open_session
from pipelinerl.llm.sample_builder import build_samples
from pipelinerl.records import VersionSpan
from pipelinerl.rollouts import RolloutResult

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
STRIPS_THOUGHTS = (
    "{%- for m in messages -%}{%- set c = m['content'] -%}"
    "{%- if m['role'] == 'assistant' and '</think>' in c -%}{%- set c = c.split('</think>')[-1] -%}{%- endif -%}"
    "<|{{ m['role'] }}|>{{ c | trim }}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
WANTS_CALLS = (
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'tool' and not messages[loop.index0 - 1]['tool_calls'] -%}"
    "{{ raise_exception('a result without a call') }}{%- endif -%}"
    "<|{{ m['role'] }}|>{{ m['content'] }}"
    "{%- for call in m['tool_calls'] or [] -%}[{{ call['function']['name'] }}]{%- endfor -%}"
    "<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer(32)


class Script:
    """Answers in order; each is a list of ids, or text that is spelled byte by byte, then the end token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, answers: Sequence[str | list[int]], end: bool = True
    ) -> None:
        self.end = tokenizer.convert_tokens_to_ids("<|end|>")
        vocabulary = tokenizer.get_vocab()
        self.answers = [
            [*([vocabulary["Ġ" if c == " " else "Ċ" if c == "\n" else c] for c in answer] if isinstance(answer, str)
               else answer), *([self.end] if end else [])]
            for answer in answers
        ]  # fmt: skip
        self._left = iter(self.answers)

    def __call__(self, body: dict[str, Any]) -> list[int]:
        return next(self._left)


@contextmanager
def serving(
    tokenizer: PreTrainedTokenizerFast, script: Script, **settings: Any
) -> Iterator[tuple[FakeServer, TrainableLLM]]:
    with FakeServer(script=script) as server:
        server.version = "3"
        llm = TrainableLLM(
            server.url, "actor", tokenizer, parameters={"max_tokens": 200, "temperature": 0.7}, token=server.token,
            **settings,
        )  # fmt: skip
        yield server, llm


@asynccontextmanager
async def chatting(
    tokenizer: PreTrainedTokenizerFast, script: Script, tools: Any = None, messages: Any = (), **settings: Any
) -> AsyncIterator[tuple[FakeServer, Chat]]:
    with serving(tokenizer, script, **settings) as (server, llm):
        async with open_session() as session:
            yield server, llm.chat(session, tools, messages)


def sent(server: FakeServer) -> list[list[int]]:
    return [request["token_ids"] for request in server.requests]


async def test_t1_three_turns_with_a_tool_keep_the_sampled_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    """Hand-written ids: the row is the server's ids, and exactly the sampled ones are trained."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 3}}</tool_call>'
    script = Script(tokenizer, [call, "15", "12 is it"])
    system = [{"role": "system", "content": "add"}]
    async with chatting(tokenizer, script, tools=TOOLS, messages=system) as (server, chat):
        first = await chat.ask("What is 12 + 3?")
        assert first.output.tool_calls is not None
        (tool_call,) = first.output.tool_calls
        assert json.loads(tool_call["function"]["arguments"]) == {"a": 12, "b": 3}
        server.version = "4"
        chat.add_tool_result(tool_call, "15")
        await chat.ask()
        server.version = "5"
        await chat.ask("Sure? 12")
    encode = chat._renderer.encode
    retokenized = encode(call)
    assert script.answers[0][:-1] != retokenized, "the answer was sampled in other tokens than its text has"
    prompt_1 = encode("<|system|>add<|end|><|user|>What is 12 + 3?<|end|><|assistant|>")
    between_1 = encode("<|tool|>15<|end|><|assistant|>")
    between_2 = encode("<|user|>Sure? 12<|end|><|assistant|>")
    prompt_2 = prompt_1 + script.answers[0] + between_1
    prompt_3 = prompt_2 + script.answers[1] + between_2
    assert sent(server) == [prompt_1, prompt_2, prompt_3]

    (text,) = chat.training_texts(reward=1.0)
    assert text.input_ids == prompt_3 + script.answers[2]
    masked = [-100]
    assert text.labels == (
        masked * len(prompt_1) + script.answers[0] + masked * len(between_1) + script.answers[1]
        + masked * len(between_2) + script.answers[2]
    )  # fmt: skip
    sizes = [len(answer) for answer in script.answers]
    assert text.version_spans == [
        VersionSpan(3, 0, sizes[0]),
        VersionSpan(4, sizes[0], sizes[0] + sizes[1]),
        VersionSpan(5, sizes[0] + sizes[1], sum(sizes)),
    ]
    assert (text.output_tokens, text.prompt_tokens, len(text.logprobs)) == (sum(sizes), len(prompt_1), sum(sizes))
    assert text.finished and text.reward == 1.0 and text.temperature == 0.7
    assert text.text.endswith("12 is it") and text.output_text == "12 is it"
    assert len(build_samples([text], group_id="g", rollout_id="g/r")) == 1
    assert [message["role"] for message in chat.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip


async def test_a_begun_answer_is_continued_and_is_one_with_what_was_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    async with chatting(tokenizer, Script(tokenizer, ["5", "7"])) as (server, chat):
        await chat.ask({"role": "user", "content": "12 + 3?"}, {"role": "assistant", "content": "It is 1"})
        await chat.ask("Sure?")
    begun = "<|user|>12 + 3?<|end|><|assistant|>It is 1"
    assert [chat._renderer.decode(ids, skip_special_tokens=False) for ids in sent(server)] == [
        begun, f"{begun}5<|end|><|user|>Sure?<|end|><|assistant|>"
    ]  # fmt: skip
    assert [message["content"] for message in chat.messages] == ["12 + 3?", "It is 15", "Sure?", "7"]
    assert [len(text.logprobs) for text in chat.training_texts(1.0)] == [2, 2]


async def test_thinking_that_the_prompt_opens_is_no_statement(tokenizer: PreTrainedTokenizerFast) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    with serving(tokenizer, Script(tokenizer, [f"or {call}", f"no</think>{call}"])) as (_, llm):
        async with open_session() as session:
            answers = [
                await llm.chat(session, tools=TOOLS).ask("1 + 2?", {"role": "assistant", "content": "<think>"})
                for _ in range(2)
            ]
    assert [len(answer.output.tool_calls or []) for answer in answers] == [0, 1]
    assert [answer.graded_text for answer in answers] == [f"<think>or {call}", "<think>no</think>"]


async def test_m5_every_sampled_token_is_trained_once_in_either_form(tokenizer: PreTrainedTokenizerFast) -> None:
    for turns in (1, 2, 5):
        script = Script(tokenizer, [str(10 + turn) for turn in range(turns)])
        async with chatting(tokenizer, script) as (_, chat):
            for turn in range(turns):
                await chat.ask(f"turn {turn}")
        sampled = [token for answer in script.answers for token in answer]
        for texts in (chat.training_texts(), chat.training_texts(by_turn=True)):
            trained = [label for text in texts for label in text.labels if label != -100]
            assert trained == sampled
            assert sum(len(text.logprobs) for text in texts) == len(sampled)
        assert len(chat.training_texts(by_turn=True)) == turns


async def test_rewards_of_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    async with chatting(tokenizer, Script(tokenizer, ["1", "2", "3"])) as (_, chat):
        with pytest.raises(ValueError, match=r"Call ask\(\) first"):
            chat.reward_turn(1)
        for reward in (0.5, None, 0.25):
            await chat.ask("go")
            if reward is not None:
                chat.reward_turn(reward)
    texts = chat.training_texts(reward=1.0)
    assert [text.reward for text in texts] == [0.5, 0.0, 1.25]
    assert all(text.metadata["step_reward"] is True for text in texts)


async def test_a_template_that_drops_thoughts_starts_a_new_sample(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = chat_tokenizer(32)
    tokenizer.chat_template = STRIPS_THOUGHTS
    script = Script(tokenizer, ["<think>hm</think>1", "2", " 3 "])
    async with chatting(tokenizer, script) as (server, chat):
        await chat.ask("a")
        await chat.ask("b")
        await chat.ask("c")
    encode = chat._renderer.encode
    rewritten = encode("<|user|>a<|end|><|assistant|>1<|end|><|user|>b<|end|><|assistant|>")
    assert sent(server) == [
        encode("<|user|>a<|end|><|assistant|>"),
        rewritten,
        rewritten + script.answers[1] + encode("<|user|>c<|end|><|assistant|>"),
    ]
    texts = chat.training_texts()
    assert [text.reward for text in texts] == [None] * len(texts)
    assert [text.metadata["turns"] for text in texts] == [1, 2]
    assert [label for text in texts for label in text.labels if label != -100] == [
        token for answer in script.answers for token in answer
    ]


async def test_a_template_that_wants_calls_in_its_own_form(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = chat_tokenizer(32)
    tokenizer.chat_template = WANTS_CALLS
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    async with chatting(tokenizer, Script(tokenizer, [call, "2"]), tools=TOOLS) as (server, chat):
        first = await chat.ask("a")
        assert first.output.tool_calls
        chat.add_tool_result(first.output.tool_calls[0], {"sum": 2})
        await chat.ask()
    expected = '<|user|>a<|end|><|assistant|>[add]<|end|><|tool|>{"sum": 2}<|end|><|assistant|>'
    assert sent(server)[1] == chat._renderer.encode(expected)
    assert len(chat.training_texts()) == 2


async def test_t6_a_full_context_ends_the_rollout_before_anything_is_sent(tokenizer: PreTrainedTokenizerFast) -> None:
    async with chatting(tokenizer, Script(tokenizer, ["12"] * 9), max_model_len=64) as (server, chat):
        with pytest.raises(RolloutError) as ended:
            for _ in range(9):
                await chat.ask("some words more")
    assert ended.value.reason == "context_overflow"
    assert server.calls.count("/inference/v1/generate") == len(chat.turns) == 3
    assert all(len(r["token_ids"]) + r["sampling_params"]["max_tokens"] <= 64 for r in server.requests)
    (text,) = chat.training_texts(reward=-1.0)
    assert text.metadata["turns"] == 3


# T5: answer, whether the end token is sampled, max_tokens, stop string -> finished, ids before the next message.
@pytest.mark.parametrize(
    ("answer", "end", "parameters", "finished", "sampled", "following"),
    [
        ("12", True, {}, True, "12<|end|>", "<|user|>x<|end|><|assistant|>"),
        ("1234", False, {"max_tokens": 4}, False, "1234", "<|end|><|user|>x<|end|><|assistant|>"),
        ("12", False, {"stop": ["2"]}, True, "12", "<|end|><|user|>x<|end|><|assistant|>"),
        ("1\x00\x002", True, {}, True, "1<|end|><|end|>2<|end|>", "<|user|>x<|end|><|assistant|>"),
    ],
    ids=["end token", "length", "stop string", "a second end token"],
)
async def test_t5_table(
    tokenizer: PreTrainedTokenizerFast, answer: str, end: bool, parameters: dict[str, Any], finished: bool,
    sampled: str, following: str,
) -> None:  # fmt: skip
    script = Script(tokenizer, ["1"], end)
    vocabulary = tokenizer.get_vocab()
    ids = [script.end if c == "\x00" else vocabulary[c] for c in answer] + ([script.end] if end else [])
    script._left = iter([ids, ids])
    async with chatting(tokenizer, script) as (server, chat):
        call = await chat.ask("a", parameters=parameters)
        call.ended_by_stop_string = "stop" in parameters
        await chat.ask("x", parameters=parameters)
    text = chat.training_texts(by_turn=True)[0]
    assert text.finished is finished
    assert [label for label in text.labels if label != -100] == ids
    assert chat._renderer.decode(ids, skip_special_tokens=False) == sampled
    first = sent(server)[0]
    assert sent(server)[1] == first + ids + chat._renderer.encode(following)
    (whole,) = chat.training_texts()
    assert whole.labels[len(first) : len(first) + len(ids)] == ids
    assert set(whole.labels[len(first) + len(ids) : len(sent(server)[1])]) == {-100}


async def test_t5_padding_that_is_the_end_token_is_trained_by_its_place(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = chat_tokenizer(32)
    tokenizer.pad_token = tokenizer.eos_token
    async with chatting(tokenizer, Script(tokenizer, ["12"])) as (_, chat):
        await chat.ask("a")
    (text,) = chat.training_texts()
    assert text.labels[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id


async def test_t7_unknown_ids_and_broken_text_do_not_crash(tokenizer: PreTrainedTokenizerFast) -> None:
    async with chatting(tokenizer, Script(tokenizer, [[100_000, 5], "1"]), tools=TOOLS) as (server, chat):
        await chat.ask("a")
        chat.add_tool_result("no such call", "half a pair \ud800 and \x00")
        await chat.ask()
    assert sent(server)[1][: len(sent(server)[0]) + 2] == [*sent(server)[0], 100_000, 5]


async def test_t8_many_chats_at_once_share_one_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    def script(body: dict[str, Any]) -> list[int]:
        return body["token_ids"][-12:]

    with FakeServer(script=script) as server:
        server.version = "0"
        llm = TrainableLLM(server.url, "actor", tokenizer, parameters={"max_tokens": 20}, token=server.token)
        async with open_session() as session:

            async def talk(number: int) -> list[int]:
                chat = llm.for_rollout(None).chat(session)
                for turn in range(4):
                    await chat.ask(f"number {number} turn {turn}")
                return chat.training_texts()[0].input_ids

            once = [await talk(number) for number in range(16)]
            assert await asyncio.gather(*(talk(number) for number in range(16))) == once


def test_the_example_of_the_document_uses_its_tool(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "agents.md"
    source = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "product.py").write_text(source)
    task = runpy.run_path(str(tmp_path / "product.py"))
    train, test = task["load_problems"](["train"]), task["load_problems"](["test"])
    assert train and test and not {item["question"] for item in train} & {item["question"] for item in test}
    arguments = json.dumps({"a": 12, "b": 12})
    script = Script(
        tokenizer,
        [f'<tool_call>{{"name": "multiply", "arguments": {arguments}}}</tool_call>', "It is 144."],
    )

    async def play(llm: TrainableLLM) -> RolloutResult:
        async with open_session() as session:
            result: RolloutResult = await task["generate_rollout"](None, llm, train[0], session)
            return result

    with serving(tokenizer, script) as (_, llm):
        result = asyncio.run(play(llm))
    (text,) = result.training_texts
    assert (text.reward, text.metadata["turns"], result.metrics.success) == (1.0, 2, True)
    assert "144" in text.prompt_text, "the tool's answer is in the second prompt"
    assert task["run_tool"]({"function": {"arguments": "[]"}}).startswith("error: ")
