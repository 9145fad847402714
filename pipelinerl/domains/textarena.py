"""Single-player games of the package textarena, by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.domains.data import check_names, optional
from pipelinerl.domains.text_game import game_rollout, seeded_problems
from pipelinerl.errors import DomainError
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.sandbox.protocol import GameStep, text_game


def load_problems(
    dataset_names: Sequence[str],
    *,
    env_id: str = "GuessTheNumber-v0",
    env_kwargs: Mapping[str, Any] | None = None,
    max_turns: int = 32,
    success_reward: float = 1.0,
    num_train: int = 1000,
    num_test: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return problems of the splits `train` and `test`.

    Raises:
        DomainError: the package or the game is missing, or the game needs more than one player.
    """
    check_names("textarena", dataset_names)
    common = {
        "env_id": env_id,
        "env_kwargs": dict(env_kwargs or {}),
        "max_turns": max_turns,
        "success_reward": success_reward,
    }
    TextArenaGame({**common, "seed": seed}).start()
    return seeded_problems("textarena", list(dataset_names), {"train": num_train, "test": num_test}, seed, common)


@text_game
class TextArenaGame:
    """A match of `problem["env_id"]` with the seed of `problem`.

    Raises:
        DomainError: there is no such game.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        textarena = optional("textarena", "textarena", "environments")
        self._problem = problem
        self._seen = ""
        try:
            self._env = textarena.make(problem["env_id"], **problem["env_kwargs"])
        except Exception as error:
            raise DomainError(f"textarena: {problem['env_id']!r} cannot be made: {error}") from error

    def start(self) -> str:
        """Begin the match and return the rules.

        Raises:
            DomainError: it needs more than one player.
        """
        try:
            self._env.reset(num_players=1, seed=int(self._problem["seed"]))
        except (AssertionError, ValueError) as error:
            raise DomainError(f"textarena: {self._problem['env_id']!r} is no game for one player: {error}") from error
        return self._news()

    def act(self, action: str) -> GameStep:
        """Make a move."""
        done, _ = self._env.step(action=after_thinking(action).strip())
        if not done:
            return GameStep(self._news(), 0.0, done=False)
        rewards, info = self._env.close()
        invalid = bool((info or {}).get(0, {}).get("invalid_move", False))
        return GameStep("", float((rewards or {}).get(0, 0.0)), done=True, valid=not invalid)

    def close(self) -> None:
        """Do nothing: a match holds nothing."""

    def _news(self) -> str:
        """Return what is new in the observation: games repeat all that went before."""
        _, observation = self._env.get_observation()
        text = str(observation)
        news = text.removeprefix(self._seen) if text.startswith(self._seen) else text
        self._seen = text
        return news.strip()


generate_textarena_rollout = game_rollout(TextArenaGame)
