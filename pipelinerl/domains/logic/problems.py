"""Problems of reasoning-gym families. Called through `dataset_loader`; makes them on the spot, nothing is downloaded.

An entry of reasoning-gym may hold objects that no record can carry. A problem therefore says how to make its entry
again: family, seed, index and settings. A family that makes other entries each time has plain ones: there the problem
holds the entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pipelinerl.domains.splits import check_names
from pipelinerl.errors import DomainError

DEFAULT_FAMILIES = ("leg_counting", "basic_arithmetic", "knights_knaves")
# Far apart, so that no seed of a training entry is one of a test entry.
_TEST_SEED_OFFSET = 1_000_000_000
# Entries by which a family is found to make the same ones each time.
_COMPARED = 3


def load_problems(
    dataset_names: Sequence[str],
    *,
    families: Sequence[str] | Mapping[str, Mapping[str, Any]] = DEFAULT_FAMILIES,
    num_train: int = 500,
    num_test: int = 50,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return `num_train` (`num_test`) problems of each family for the splits `train` and `test`.

    Args:
        families: names, or a mapping name -> settings of that family (as reasoning-gym has them).

    Raises:
        DomainError: the package is not installed, or it does not know a family or a setting.
    """
    if find_spec("reasoning_gym") is None:
        raise DomainError("logic: the package reasoning-gym is needed. Install pipelinerl[reasoning-gym].")
    check_names("logic", dataset_names)
    settings = {name: {} for name in families} if not isinstance(families, Mapping) else families
    problems: list[dict[str, Any]] = []
    for split in dataset_names:
        size = num_train if split == "train" else num_test
        for family, options in settings.items():
            recipe = {
                "family": family,
                "seed": seed + (_TEST_SEED_OFFSET if split == "test" else 0),
                "size": size,
                "settings": dict(options or {}),
            }
            problems += _problems_of(recipe, split)
    return problems


def _problems_of(recipe: dict[str, Any], split: str) -> list[dict[str, Any]]:
    data = make_dataset(recipe)
    repeats = _repeats(data, make_dataset(recipe), min(recipe["size"], _COMPARED))
    problems = []
    for index in range(recipe["size"]):
        entry = data[index]
        problems.append(
            {
                **({} if repeats else {"entry": dict(entry)}),
                "id": f"logic-{recipe['family']}-{recipe['seed']}-{index}",
                "dataset": recipe["family"] if split == "train" else f"{recipe['family']}_test",
                "index": index,
                "question": str(entry["question"]),
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                **recipe,
            }
        )
    return problems


def _repeats(data: Any, again: Any, count: int) -> bool:
    """Whether two data sets of one recipe agree; some families draw from a source of chance of their own."""
    entries = ((data[index], again[index]) for index in range(count))
    return all(
        (first["question"], str(first["answer"])) == (second["question"], str(second["answer"]))
        for first, second in entries
    )


def make_dataset(recipe: Mapping[str, Any]) -> Any:
    """Return the reasoning-gym data set of a recipe (or of a problem, which holds its recipe).

    Raises:
        DomainError: the family or a setting is unknown.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    family = recipe["family"]
    if family not in DATASETS:
        near = difflib.get_close_matches(family, sorted(DATASETS), n=3)
        raise DomainError(
            f"logic: reasoning-gym has no family {family!r}, expected one of its {len(DATASETS)}. "
            f"Near ones: {', '.join(near) or 'none'}. Change dataset_loader_params.families."
        )
    try:
        return reasoning_gym.create_dataset(family, seed=recipe["seed"], size=recipe["size"], **recipe["settings"])
    except (TypeError, ValueError, AssertionError) as error:
        raise DomainError(f"logic: family {family!r} does not take {recipe['settings']}: {error}") from error


def gold_answer(problem: dict[str, Any]) -> str | None:
    """Return a right output; some families have many and name none."""
    return None if problem["answer"] is None else f"<answer>{problem['answer']}</answer>"
