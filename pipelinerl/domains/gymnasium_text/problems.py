"""Problems of a gymnasium environment: the seeds of its episodes. Called through `dataset_loader`.

Waits for the import of the environment.
"""

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
    if find_spec("gymnasium") is None:
        raise DomainError("gymnasium_text: the package gymnasium is needed. Install pipelinerl[environments].")
    from pipelinerl.domains.gymnasium_text.game import GymnasiumGame

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
