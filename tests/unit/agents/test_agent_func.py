"""The agent function: shapes that it may return, ids that are kept, rewards, metrics, and errors of either kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.fake_server import FakeServer
from transformers import PreTrainedTokenizerFast

from pipelinerl.agents.agent_func import generate_agent_rollout, read_step
from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.llm.sample_builder import build_samples
from pipelinerl.tiny.tokenizer import build_tokenizer

GROWS = """
import torch

async def step(state, action, label, **kwargs):
    done = state.count("again") == 2
    reward = torch.tensor([0.25])
    extra = {"length": torch.tensor(len(action)), "note": "text", "bad": float("nan"), "reward": 7, **EXTRA}
    return reward, state + action + " again", done, extra
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(32)


@pytest.fixture
def server(tokenizer: PreTrainedTokenizerFast) -> Iterator[FakeServer]:
    """Answers `1`, `2`, end: the text `12` would be another token."""
    vocabulary = tokenizer.get_vocab()
    answer = [vocabulary["1"], vocabulary["2"], vocabulary["<|end|>"]]
    with FakeServer(script=lambda body: answer) as fake:
        fake.version = "0"
        yield fake


async def play(
    server: FakeServer, tokenizer: Any, source: str, folder: Path, max_model_len: int | None = None, **agent: Any
) -> Any:
    file = folder / "agent_func.py"
    file.write_text(source)
    cfg = SimpleNamespace(
        actor=SimpleNamespace(agent_func_path=str(file)),
        agent=SimpleNamespace(**{"max_steps": 8, "reward": "sum", "action_special_tokens": False, **agent}),
    )
    llm = TrainableLLM(server.url, "actor", tokenizer, {"max_tokens": 9, "temperature": 1.0}, token=server.token)
    llm.max_model_len = max_model_len
    async with open_session() as session:
        return await generate_agent_rollout(cfg, llm, {"state": "go", "label": "x", "dataset": "train"}, session)


async def test_ids_are_kept_while_the_state_grows(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    result = await play(server, tokenizer, GROWS.replace("EXTRA", "{}"), tmp_path)
    (text,) = result.training_texts
    go, again = tokenizer.encode("go"), tokenizer.encode(" again")
    answer = tokenizer.convert_tokens_to_ids(["1", "2", "<|end|>"])
    assert text.input_ids == go + answer + again + answer + again + answer
    masked = [[-100] * len(ids) for ids in (go, again, again)]
    assert text.labels == masked[0] + answer + masked[1] + answer + masked[2] + answer
    assert text.reward == 0.75 and result.metrics.success and result.dataset_name == "train"
    assert result.metrics.model_dump() == {
        "reward": 0.75, "success": True, "no_error": True, "no_answer": False,
        "num_steps": 3, "context_full": False, "length": 2.0, "extra_reward": 7.0,
    }  # fmt: skip
    build_samples(result.training_texts, group_id="g", rollout_id="r")


async def test_the_last_reward_and_success_of_the_function(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = GROWS.replace("EXTRA", '{"success": False}')
    result = await play(server, tokenizer, source, tmp_path, reward="last")
    assert result.metrics.reward == 0.25 and not result.metrics.success


async def test_another_state_starts_a_new_sample_and_three_values_are_enough(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = 'async def step(state, action, label):\n    return 1, "anew " + action, state != "go"\n'
    result = await play(server, tokenizer, source, tmp_path)
    first, second = result.training_texts
    assert second.input_ids[: len(tokenizer.encode("anew 12"))] == tokenizer.encode("anew 12")
    assert first.reward == second.reward == 2.0


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ("<|user|>again<|assistant|>", "<|user|>again<|assistant|>"),
        ("<|end|><|user|>again<|assistant|>", "<|user|>again<|assistant|>"),
        ("<|end|><|end|>again", "<|end|>again"),
        ("<|pad|>again", "<|pad|>again"),
        (" again <|end|>", " again <|end|>"),
        ("<|end|>", ""),
        ("", ""),
    ],
)
async def test_the_prompt_is_what_the_function_wrote(
    rest: str, kept: str, server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Special tokens too; only the end token that was sampled is not there twice."""
    source = f"async def step(state, action, label):\n    return 1, state + action + {rest!r}, state != 'go'\n"
    result = await play(server, tokenizer, source, tmp_path)
    (text,) = result.training_texts
    answer = tokenizer.convert_tokens_to_ids(["1", "2", "<|end|>"])
    between = tokenizer.encode(kept)
    assert server.requests[1]["token_ids"] == tokenizer.encode("go") + answer + between
    assert text.input_ids == tokenizer.encode("go") + answer + between + answer
    assert text.labels == [-100] * len(tokenizer.encode("go")) + answer + [-100] * len(between) + answer


async def test_an_action_with_special_tokens_is_all_that_was_sampled(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """What follows it is added as it is, also the same token again."""
    source = (
        "async def step(state, action, label):\n"
        "    return action == '12<|end|>', state + action + '<|end|><|user|>7', state != 'go'\n"
    )
    result = await play(server, tokenizer, source, tmp_path, action_special_tokens=True)
    (text,) = result.training_texts
    between = tokenizer.encode("<|end|><|user|>7")
    answer = tokenizer.convert_tokens_to_ids(["1", "2", "<|end|>"])
    assert text.input_ids == tokenizer.encode("go") + answer + between + answer
    assert (text.reward, text.output_text) == (2.0, "12<|end|>")
    assert text.text == tokenizer.decode(text.input_ids)


async def test_an_end_token_behind_an_answer_without_one_is_kept(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The answer has nine tokens, the limit: the end of the message is the function's."""
    digits = tokenizer.convert_tokens_to_ids([*"123456789"])
    source = "async def step(state, action, label):\n    return 1, state + action + '<|end|>7', state != 'go'\n"
    with FakeServer(script=lambda body: digits) as server:
        server.version = "0"
        await play(server, tokenizer, source, tmp_path)
    end, seven = tokenizer.convert_tokens_to_ids(["<|end|>", "7"])
    assert server.requests[1]["token_ids"] == [*tokenizer.encode("go"), *digits, end, seven]


async def test_a_full_context_ends_the_episode_with_the_reward_so_far(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """`go` has 2 ids, an answer 3, ` again` 6: prompts of 2, 11 and 20 ids. In 20 ids there is room for two answers."""
    source = GROWS.replace("EXTRA", "{}")
    assert (len(tokenizer.encode("go")), len(tokenizer.encode(" again"))) == (2, 6)
    result = await play(server, tokenizer, source, tmp_path, max_model_len=20)
    (text,) = result.training_texts
    assert len(server.requests) == 2 and len(text.input_ids) == 14
    assert (text.reward, text.finished, text.finish_reason) == (0.5, False, "length")
    assert (result.metrics.num_steps, result.metrics.context_full) == (2, True)
    (sample,) = build_samples(result.training_texts, group_id="g", rollout_id="r")
    assert (sample.finished, sample.finish_reason, sample.output_tokens) == (False, "length", 6)


async def test_a_prompt_that_fills_the_context_fails_the_rollout(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(RolloutError, match="context_overflow"):
        await play(server, tokenizer, GROWS.replace("EXTRA", "{}"), tmp_path, max_model_len=2)


async def test_an_episode_that_never_ends_is_cut(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = (
        "def step(state, action, label, sampling_params):\n"
        '    return sampling_params["max_tokens"], state + action, False\n'
    )
    result = await play(server, tokenizer, source, tmp_path, max_steps=4)
    assert result.metrics.num_steps == 4 and result.metrics.reward == 36


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, DomainError),
        ((1, "x"), DomainError),
        ((1, 2, True, {}), DomainError),
        ((None, "x", True, {}), RolloutError),
        ((float("nan"), "x", True, {}), RolloutError),
        ((torch.rand(2), "x", True, {}), RolloutError),
    ],
)
def test_what_it_returns_is_checked(answer: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as refused:
        read_step(answer, "step of agent_func.py:3")
    if isinstance(refused.value, RolloutError):
        assert refused.value.reason == "bad_reward"
    else:
        assert "step of agent_func.py:3" in str(refused.value)


def test_rewards_of_other_kinds() -> None:
    assert read_step((torch.tensor(0), "x", torch.tensor(True), None), "f")[::2] == (0.0, True)
    assert read_step((torch.rand(1) * 0 + 1, "x", 0), "f") == (1.0, "x", False, {})
