"""The guessing domain against values worked out by hand: problems, words, rewards, and when a game ends."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.domains import guessing as rollout_module
from pipelinerl.domains.guessing import (
    Game,
    chat_messages,
    feedback,
    generate_guessing_rollout,
    load_problems,
    parse_answer,
    turn_messages,
)
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import RolloutResult, TrainingText


def test_default_problems_follow_the_formula() -> None:
    problems = load_problems(["train", "test"])
    train = [p["answer"] for p in problems if p["dataset"] == "train"]
    test = [p["answer"] for p in problems if p["dataset"] == "test"]
    # (2 * i * 191) % 1024 + 1 and ((2 * i + 1) * 191) % 1024 + 1
    assert train[:4] == [1, 383, 765, 123]
    assert test[:3] == [192, 574, 956]
    assert sorted(train + test) == list(range(1, 1025))
    assert len({p["id"] for p in problems}) == 1024
    assert problems[0]["max_turns"] == 13 and problems[0]["high"] == 1024


def test_only_the_named_data_sets_come_back() -> None:
    assert {p["dataset"] for p in load_problems(["test"])} == {"test"}
    assert load_problems([]) == []
    with pytest.raises(DomainError, match="dev"):
        load_problems(["dev"])


def test_games_with_opening_guesses_are_held_out_whole() -> None:
    params = {"n": 32, "max_turns": 5, "opening_guesses": 2, "num_train": 600, "num_test": 200, "seed": 3}
    problems = load_problems(["train", "test"], **params)
    games: dict[str, set[tuple[int, tuple[int, ...]]]] = {"train": set(), "test": set()}
    for problem in problems:
        assert len(set(problem["opening_guesses"])) == 2
        assert problem["answer"] not in problem["opening_guesses"]
        assert all(1 <= number <= 32 for number in [problem["answer"], *problem["opening_guesses"]])
        games[problem["dataset"]].add((problem["answer"], tuple(sorted(problem["opening_guesses"]))))
    assert len(games["train"]) == 600 and len(games["test"]) == 200
    assert not games["train"] & games["test"]
    # every number is an answer in training: nothing is held out by number
    assert {answer for answer, _ in games["train"]} == set(range(1, 33))


def test_the_split_does_not_depend_on_which_set_is_loaded() -> None:
    params = {"n": 32, "opening_guesses": 1, "num_train": 100, "num_test": 50}
    both = load_problems(["train", "test"], **params)
    assert [p for p in both if p["dataset"] == "test"] == load_problems(["test"], **params)
    assert load_problems(["test"], **params, seed=1) != load_problems(["test"], **params, seed=2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 8, "opening_guesses": 1, "num_train": 40, "num_test": 10}, "allow 56 different games"),
        ({"n": 1}, "expected n >= 2"),
        ({"max_turns": 0}, "expected n >= 2"),
        ({"n": 4, "opening_guesses": 4}, "opening_guesses=4"),
        ({"history": "tree"}, "history='tree'"),
    ],
)
def test_impossible_parameters_are_explained(params: dict[str, Any], message: str) -> None:
    with pytest.raises(DomainError, match=message):
        load_problems(["train"], **params)


def test_words_of_a_turn() -> None:
    messages = turn_messages(1, 1024, [], 7)
    assert messages == [
        {"role": "system", "content": "You are a helpful assistant"},
        {
            "role": "user",
            "content": "You must guess a number between 1 and 1024. Output the answer as <answer>number</answer>."
            " After each guess I will tell you if your answer is higher or lower than the target number.",
        },
    ]
    assert feedback([5, 9], 7) == (
        "Your 2 previous guesses:\n5, which is lower than the target number.\n"
        "9, which is higher than the target number."
    )
    # the mark of a wrong output stands where that output was, and nowhere else
    assert feedback([None, 9], 7) == (
        "Your 2 previous guesses:\n<wrong output>\n9, which is higher than the target number."
    )


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("<answer>17</answer>", 17),
        ("I say <answer>3</answer> or <answer>4</answer>", 3),
        ("<answer>17", None),
        ("<answer>-1</answer>", None),
        ("", None),
        ("<answer>" + "9" * 5000 + "</answer>", None),
    ],
)
def test_answers_are_read(text: str, guess: int | None) -> None:
    assert parse_answer(text) == guess


def test_each_guess_is_an_answer_and_each_hint_a_reply() -> None:
    messages = chat_messages(1, 16, [6, None, 3], 5)
    assert [message["role"] for message in messages] == ["system", "user"] + ["assistant", "user"] * 3
    assert [message["content"] for message in messages[2:]] == [
        "<answer>6</answer>",
        "6 is higher than the target number.",
        "<wrong output>",
        "<wrong output>",
        "<answer>3</answer>",
        "3 is lower than the target number.",
    ]


def test_problems_say_how_the_game_is_told() -> None:
    settings = {"n": 16, "max_turns": 5, "opening_guesses": 2, "num_train": 4, "num_test": 2}
    (problem, *_) = load_problems(["train"], history="chat", **settings)
    assert len(Game.from_problem(problem).messages()) == 6
    (problem, *_) = load_problems(["train"], **settings)
    assert len(Game.from_problem(problem).messages()) == 3


class Script:
    """Stands in for the client of the servers: gives the scripted outputs in order and keeps the prompts."""

    def __init__(self, outputs: list[str | None]) -> None:
        self.outputs = outputs
        self.prompts: list[Prompt] = []

    async def generate(self, llm: Any, prompt: Prompt, session: Any) -> Any:
        content = self.outputs[len(self.prompts)]
        self.prompts.append(prompt)
        output = type("Output", (), {"content": content})()
        return type("Call", (), {"output": output, "graded_text": content or ""})()

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
    assert script.prompts[2].messages[2]["content"] == feedback([512, 900], 700)


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
