"""A game of guessing against a scripted model: texts sent, rewards given, and when it ends."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.domains import guessing as rollout_module
from pipelinerl.domains.guessing import generate_guessing_rollout
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import RolloutResult, TrainingText


class Script:
    """Stands in for the client of the servers: gives the scripted outputs in order and keeps the prompts."""

    def __init__(self, outputs: list[str | None]) -> None:
        self.outputs = outputs
        self.prompts: list[Prompt] = []

    async def generate(self, llm: Any, prompt: Prompt, session: Any) -> Any:
        content = self.outputs[len(self.prompts)]
        self.prompts.append(prompt)
        return type("Call", (), {"output": type("Output", (), {"content": content})()})()

    @staticmethod
    def make_text(llm: Any, call: Any) -> TrainingText:
        return TrainingText(text=call.output.content or "")


async def play(
    monkeypatch: pytest.MonkeyPatch, problem: dict[str, Any], outputs: list[str | None]
) -> tuple[RolloutResult, Script]:
    script = Script(outputs)
    monkeypatch.setattr(rollout_module, "llm_async_generate", script.generate)
    monkeypatch.setattr(rollout_module, "make_training_text", script.make_text)
    result = await generate_guessing_rollout(OmegaConf.create({}), None, problem, None)  # type: ignore[arg-type]
    return result, script


async def test_a_right_guess_at_the_third_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = ["<answer>512</answer>", "<answer>900</answer>", "<answer>700</answer>"]
    result, script = await play(monkeypatch, {"answer": 700, "dataset": "train"}, outputs)
    assert [text.reward for text in result.training_texts] == [1.8, 1.8, 1.8]
    assert (result.metrics.reward, result.metrics.success) == (1.8, True)
    assert result.metrics.no_error and not result.metrics.no_answer
    assert result.dataset_name == "train" and result.latency >= 0
    assert len(script.prompts[0].messages) == 2
    assert script.prompts[2].messages[2]["content"] == (
        "Your 2 previous guesses:\n512, which is lower than the target number.\n"
        "900, which is higher than the target number."
    )


async def test_a_wrong_output_ends_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[str | None] = ["<answer>5</answer>", "five?", "unused"]
    result, script = await play(monkeypatch, {"answer": 7, "dataset": "test"}, outputs)
    assert [text.reward for text in result.training_texts] == [-1.9, -1.9]
    assert not result.metrics.success and not result.metrics.no_error and result.metrics.no_answer
    assert "wrong output" not in str([prompt.messages for prompt in script.prompts])


async def test_no_text_at_all_is_a_wrong_output(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = await play(monkeypatch, {"answer": 7, "dataset": "test"}, [None])
    assert result.metrics.reward == -2


async def test_thirteen_turns_without_the_number_are_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = await play(monkeypatch, {"answer": 7, "dataset": "train"}, ["<answer>8</answer>"] * 14)
    assert len(result.training_texts) == 13
    assert result.metrics.reward == 0 and not result.metrics.success and result.metrics.no_error


async def test_the_problem_sets_range_turns_and_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"answer": 7, "dataset": "train", "low": 1, "high": 32, "max_turns": 2, "opening_guesses": [4, 12]}
    result, script = await play(monkeypatch, problem, ["<answer>8</answer>", "<answer>7</answer>"])
    first = script.prompts[0].messages
    assert "between 1 and 32" in first[1]["content"]
    assert first[2]["content"].startswith("Your 2 previous guesses:\n4, which is lower")
    # the opening guesses are not turns: the second guess of the model is turn 1
    assert [text.reward for text in result.training_texts] == [1.9, 1.9]
    assert problem["opening_guesses"] == [4, 12]
