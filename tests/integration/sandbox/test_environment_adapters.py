"""Adapters for gymnasium and textarena, against the real packages: actions, rewards, endings, and what is refused."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("textarena")

from pipelinerl.__main__ import main
from pipelinerl.domains import gymnasium_text, textarena
from pipelinerl.domains.gymnasium_text import GymnasiumGame
from pipelinerl.domains.textarena import TextArenaGame
from pipelinerl.errors import DomainError
from pipelinerl.sandbox.pool import GamePool
from pipelinerl.sandbox.protocol import GameOpened, GameStep, OpenGame

LAKE = {
    "env_id": "FrozenLake-v1",
    "env_kwargs": {"is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
}


def test_gymnasium_walks_over_the_lake() -> None:
    game = GymnasiumGame(gymnasium_text.load_problems(["train"], **LAKE, num_train=1)[0])
    assert "Actions: left, down, right, up." in game.start()
    for word in ("down", "DOWN", "right", "1", "right"):
        step = game.act(f"<action>{word}</action>")
        assert step.valid and not step.done and "G" in step.observation
    last = game.act("<think>hm</think><action>right</action>")
    game.close()
    assert last.done and last.reward == 1.0


@pytest.mark.parametrize(
    "text", ["down", "<action>fly</action>", "<action>4</action>", "<action>-1</action>", "", "\x00"]
)
def test_gymnasium_ends_with_what_is_no_action(text: str) -> None:
    game = GymnasiumGame(gymnasium_text.load_problems(["test"], **LAKE, num_test=1, invalid_reward=-0.5)[0])
    game.start()
    step = game.act(text)
    assert step.done and not step.valid and step.reward == -0.5


def test_gymnasium_refuses_what_is_no_text() -> None:
    with pytest.raises(DomainError, match="NoSuchThing"):
        gymnasium_text.load_problems(["train"], env_id="NoSuchThing-v0")
    with pytest.raises(DomainError, match="CartPole"):
        gymnasium_text.load_problems(["train"], env_id="CartPole-v1")


def test_textarena_is_played_to_its_end() -> None:
    problem = textarena.load_problems(["train"], num_train=1)[0]
    game = TextArenaGame(problem)
    low, high = (int(word) for word in re.findall(r"between (\d+) and (\d+)", game.start())[0])
    for _ in range(6):
        middle = (low + high) // 2
        step = game.act(f"[{middle}]")
        if step.done:
            break
        assert len(step.observation) < 200, "only what is new"
        low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)
    assert step.done and step.reward == 1.0 and step.valid


def test_textarena_counts_moves_that_are_none() -> None:
    game = TextArenaGame(textarena.load_problems(["test"], num_test=1)[0])
    game.start()
    step = game.act("x" * 100_000)
    while not step.done:
        step = game.act("\x00 [half")
    assert step.reward < 1.0 and not step.valid


def test_textarena_names_what_is_missing() -> None:
    with pytest.raises(DomainError, match="NoSuchGame"):
        textarena.load_problems(["train"], env_id="NoSuchGame-v0")
    with pytest.raises(DomainError, match="one player"):
        textarena.load_problems(["train"], env_id="TicTacToe-v0")


def test_splits_have_seeds_of_their_own() -> None:
    train, test = (textarena.load_problems([name], num_train=5, num_test=5) for name in ("train", "test"))
    assert not {each["seed"] for each in train} & {each["seed"] for each in test}


@pytest.mark.parametrize("name", ["gymnasium_text", "textarena"])
def test_check_domain(name: str) -> None:
    assert main(["check-domain", name]) == 0


async def test_both_play_in_game_processes() -> None:
    lake = gymnasium_text.load_problems(["train"], **LAKE, num_train=1)[0]
    number = textarena.load_problems(["train"], num_train=1)[0]
    async with GamePool(1, timeout_s=120.0, memory_bytes=4 << 30, max_games=2, idle_timeout_s=3600) as games:
        walk = await games.open(OpenGame("pipelinerl.domains.gymnasium_text.GymnasiumGame", lake))
        guess = await games.open(OpenGame("pipelinerl.domains.textarena.TextArenaGame", number))
        assert isinstance(walk, GameOpened) and "Actions: left, down, right, up." in walk.text
        assert isinstance(guess, GameOpened) and "between" in guess.text
        for word in ("down", "down", "right", "down", "right"):
            step = await games.act(walk.number, f"<action>{word}</action>")
            assert isinstance(step, GameStep) and not step.done
        assert isinstance(await games.act(guess.number, "[7]"), GameStep)
        last = await games.act(walk.number, "<action>right</action>")
        assert isinstance(last, GameStep) and last.done and last.reward == 1.0
