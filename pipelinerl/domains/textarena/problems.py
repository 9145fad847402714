"""Problems of a textarena game: the seeds of its matches. Called through `dataset_loader`; imports the game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pipelinerl.domains.splits import check_names
from pipelinerl.domains.text_game import seeded_problems
from pipelinerl.errors import DomainError


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
    if find_spec("textarena") is None:
        raise DomainError("textarena: the package textarena is needed. Install pipelinerl[environments].")
    from pipelinerl.domains.textarena.game import TextArenaGame

    check_names("textarena", dataset_names)
    common = {
        "env_id": env_id,
        "env_kwargs": dict(env_kwargs or {}),
        "max_turns": max_turns,
        "success_reward": success_reward,
    }
    TextArenaGame({**common, "seed": seed}).start()
    return seeded_problems("textarena", list(dataset_names), {"train": num_train, "test": num_test}, seed, common)
