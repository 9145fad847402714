"""One match of a textarena game for one player. Called by the rollout, in a thread."""

from __future__ import annotations

from typing import Any

import textarena

from pipelinerl.errors import DomainError
from pipelinerl.sandbox.game_messages import GameStep, text_game


@text_game
class TextArenaGame:
    """A match of `problem["env_id"]` with the seed of `problem`.

    Raises:
        DomainError: there is no such game.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
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
        done, _ = self._env.step(action=action)
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
