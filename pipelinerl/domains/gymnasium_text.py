"""Environments of the package gymnasium that can be played in text, by their ids."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.domains.answers import tagged_answer, whole_number
from pipelinerl.domains.data import check_names, optional
from pipelinerl.domains.text_game import game_rollout, seeded_problems
from pipelinerl.errors import DomainError
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.sandbox.protocol import GameStep, text_game


def load_problems(
    dataset_names: Sequence[str],
    *,
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    module: str | None = None,
    action_names: Sequence[str] | None = None,
    instructions: str = "",
    max_turns: int = 32,
    success_reward: float = 1.0,
    invalid_reward: float = -1.0,
    num_train: int = 1000,
    num_test: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return problems of the splits `train` and `test`.

    Args:
        env_id: as for `gymnasium.make`; its observations are texts, or it renders in mode `ansi`. Its actions are texts
            or numbers from 0.
        module: imported first; it registers the environment.
        action_names: words for the numbers of a discrete action space.
        instructions: words before the first observation.
        success_reward: sum of rewards from which on an episode is a success.
        invalid_reward: for an answer that is no action; it ends the episode.

    Raises:
        DomainError: the package or the environment is missing, or it cannot be played in text.
    """
    check_names("gymnasium_text", dataset_names)
    common = {
        "env_id": env_id,
        "env_kwargs": dict(env_kwargs or {}),
        "module": module,
        "action_names": list(action_names) if action_names else None,
        "instructions": instructions,
        "max_turns": max_turns,
        "success_reward": success_reward,
        "invalid_reward": invalid_reward,
    }
    trial = GymnasiumGame({**common, "seed": seed})
    try:
        trial.start()
    finally:
        trial.close()
    return seeded_problems("gymnasium", list(dataset_names), {"train": num_train, "test": num_test}, seed, common)


_HELP = "Answer with <action>your action</action>."


@text_game
class GymnasiumGame:
    """An episode of `problem["env_id"]` with the seed of `problem`.

    Raises:
        DomainError: there is no such environment, or it cannot be played in text.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        gymnasium = optional("gymnasium", "gymnasium_text", "environments")
        self._gymnasium, self._problem = gymnasium, problem
        try:
            if problem.get("module"):
                importlib.import_module(problem["module"])
            self._env = self._make()
            self._is_text = isinstance(self._env.observation_space, gymnasium.spaces.Text)
            if not self._is_text and "ansi" not in self._env.metadata.get("render_modes", ()):
                raise DomainError(
                    f"gymnasium_text: {problem['env_id']!r} has neither text observations nor the render mode ansi."
                )
            if not self._is_text:
                self._env = self._make(render_mode="ansi")
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise DomainError(f"gymnasium_text: {problem['env_id']!r} cannot be made: {error}") from error
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
            raise DomainError(f"gymnasium_text: {problem['env_id']!r} has actions {space}, expected texts or numbers.")
        self._num_actions = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else None

    def _make(self, **kwargs: Any) -> Any:
        return self._gymnasium.make(self._problem["env_id"], **self._problem["env_kwargs"], **kwargs)

    def start(self) -> str:
        """Begin the episode and return the first text."""
        observation, _ = self._env.reset(seed=int(self._problem["seed"]))
        parts = [self._problem["instructions"], self._text(observation), self._choices(), _HELP]
        return "\n".join(part for part in parts if part)

    def act(self, action: str) -> GameStep:
        """Take the action that is stated in the model's text."""
        chosen = self._read(action)
        if chosen is None:
            return GameStep("", float(self._problem["invalid_reward"]), done=True, valid=False)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        return GameStep(self._text(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        """Free what the environment holds."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self._is_text:
            return str(observation)
        shown = self._env.render()
        if not isinstance(shown, str):
            raise DomainError(
                f"gymnasium_text: {self._problem['env_id']!r} has neither text observations nor mode ansi."
            )
        return shown

    def _choices(self) -> str:
        if self._num_actions is None:
            return ""
        names = self._problem["action_names"] or [str(number) for number in range(self._num_actions)]
        return f"Actions: {', '.join(names)}."

    def _read(self, text: str) -> Any:
        stated = tagged_answer(text, "action")
        if self._num_actions is None:
            return after_thinking(text).strip() if stated is None else stated
        if stated is None:
            return None
        names = [name.lower() for name in self._problem["action_names"] or []]
        number = names.index(stated.lower()) if stated.lower() in names else whole_number(stated)
        return number if number is not None and 0 <= number < self._num_actions else None


generate_gymnasium_text_rollout = game_rollout(GymnasiumGame)
