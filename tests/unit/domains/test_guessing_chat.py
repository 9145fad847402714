"""The guessing game as a dialogue."""

from __future__ import annotations

import pytest

from pipelinerl.domains.guessing import Game, chat_messages, load_problems


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


def test_unknown_history_is_refused() -> None:
    with pytest.raises(ValueError, match="history='tree'"):
        load_problems(["train"], history="tree")
