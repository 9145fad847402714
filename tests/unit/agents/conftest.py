"""An agent's surroundings: a server with scripted answers, and one rollout of a black box on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fakes.fake_server import FakeServer
from fakes.scripted_texts import Texts, chat_tokenizer
from transformers import PreTrainedTokenizerFast

from pipelinerl.agents import black_box
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.rollouts import RolloutResult

RunAgent = Callable[..., Awaitable[RolloutResult]]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer(64)


@pytest.fixture
def texts(tokenizer: PreTrainedTokenizerFast) -> Texts:
    return Texts(tokenizer, default="12")


@pytest.fixture
def server(texts: Texts) -> Iterator[FakeServer]:
    with FakeServer(script=texts) as fake:
        fake.version = "0"
        yield fake


@pytest.fixture
def run(server: FakeServer, tokenizer: PreTrainedTokenizerFast) -> RunAgent:
    """`await run(agent, problem, **settings)`: one rollout of an agent, or of a box that is used again."""

    async def once(agent: Any, problem: dict[str, Any] | None = None, **settings: Any) -> RolloutResult:
        box = agent if hasattr(agent, "close") else black_box(agent)
        parameters = {"max_tokens": 100, "temperature": 0.7, **settings.pop("parameters", {})}
        llm = TrainableLLM(server.url, "actor", tokenizer, parameters, token=server.token, max_retries=0, **settings)
        try:
            async with open_session() as session:
                return await box({}, llm, {"dataset": "train", "q": "1 + 2", **(problem or {})}, session)
        finally:
            await box.close()

    return once
