"""Problems that the built-in domains make: drawn into disjoint splits."""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from pipelinerl.errors import DomainError

SPLITS = ("train", "test")
# Every 5th problem, by the hash of its content, is a test problem.
_TEST_SHARE = 5
_MAX_TRIES_PER_PROBLEM = 200

Problem = dict[str, Any]
#: Makes one problem, with a text that tells it from all others; that text decides the split.
Draw = Callable[[random.Random], tuple[str, Problem]]


def check_names(domain: str, names: Sequence[str]) -> None:
    """Refuse unknown data sets.

    Raises:
        DomainError: names them.
    """
    unknown = [name for name in names if name not in SPLITS]
    if unknown:
        raise DomainError(
            f"{domain}: unknown data sets {unknown}, expected some of {list(SPLITS)}. "
            "Change train_dataset_names or test_dataset_names."
        )


def optional(package: str, domain: str, extra: str) -> Any:
    """Import a package, or a module of one, that comes with `pipelinerl[extra]`.

    Raises:
        DomainError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DomainError(missing_package(package.partition(".")[0], domain, extra, error)) from error


def missing_package(package: str, domain: str, extra: str, error: Exception | None = None) -> str:
    """Say what to install."""
    why = f": {error}" if error is not None else ", which is not installed"
    return (
        f"{domain}: the package {package} is needed{why}. Install pipelinerl[{extra}] (in a checkout: pip install "
        f"-e '.[{extra}]'), or start another experiment, such as --config-name guessing."
    )


def draw_problems(
    domain: str,
    names: Sequence[str],
    sizes: tuple[int, int],
    seed: int,
    draw: Draw,
) -> list[Problem]:
    """Return different problems of each named split.

    Args:
        sizes: number of problems of `train` and of `test`.

    Raises:
        DomainError: a name is unknown, or `draw` knows too few different problems.
    """
    problems: list[Problem] = []
    for name in map(str, names):
        check_names(domain, [name])
        size = sizes[SPLITS.index(name)]
        rng = random.Random(f"{domain}/{name}/{seed}")
        found: dict[str, Problem] = {}
        for _ in range(size * _MAX_TRIES_PER_PROBLEM):
            if len(found) == size:
                break
            key, problem = draw(rng)
            digest = hashlib.blake2b(f"{domain}/{key}".encode(), digest_size=8).digest()
            if (digest[0] % _TEST_SHARE == 0) == (name == "test") and key not in found:
                found[key] = {"id": f"{domain}-{digest.hex()}", "dataset": name, **problem}
        if len(found) < size:
            raise DomainError(
                f"{domain}: found only {len(found)} different problems for {name!r}, {size} are wanted. "
                "Change dataset_loader_params: fewer problems, or larger ones."
            )
        problems.extend(found.values())
    return problems
