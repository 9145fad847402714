"""Problems of all domains of a mix. Called through `dataset_loader`; waits for the domains' own loaders.

Each problem says its domain and that domain's share, by which the actor draws: whatever the sizes of the data sets,
the domains come in the proportion of their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.domains.gold_score import gold_score
from pipelinerl.domains.multi.parts import load_module, read_parts
from pipelinerl.domains.splits import check_names
from pipelinerl.errors import DomainError


def load_problems(dataset_names: Sequence[str], *, domains: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the problems of all domains for the names `train` and `test`.

    Args:
        domains: name -> weight, or name -> {weight, module, rollout, train, test, params}.

    Raises:
        DomainError: see `read_parts`; or a domain has no problem.
    """
    check_names("multi", dataset_names)
    problems = []
    for split in dataset_names:
        for part in read_parts(domains):
            names = part.train if split == "train" else part.test
            own = load_module(part.module, part.name).load_problems(names, **part.params)
            if not own and names:
                raise DomainError(f"multi: domain {part.name!r} has no problem for {names}. Change its data sets.")
            problems += [_wrapped(problem, part.name, part.share, part.module, part.rollout) for problem in own]
    return problems


def _wrapped(problem: dict[str, Any], name: str, share: float, module: str, rollout: str) -> dict[str, Any]:
    own_dataset = str(problem.get("dataset", name))
    dataset = name if own_dataset in ("train", "test", "default", name) else f"{name}/{own_dataset}"
    wrapped = {
        "dataset": dataset,
        "domain": name,
        "share": share,
        "module": module,
        "rollout": rollout,
        "problem": problem,
    }
    if problem.get("id") is not None:
        wrapped["id"] = f"{name}/{problem['id']}"
    return wrapped


def validate(problem: dict[str, Any], config: Any = None) -> float | None:
    """Return what the domain's own check says of the gold answer; None if it has none."""
    check = getattr(load_module(problem["module"], problem["domain"]), "validate", None)
    return None if check is None else gold_score(check, problem["problem"], config)


def gold_answer(problem: dict[str, Any]) -> str | None:
    """Return the domain's own right output; None if it has none."""
    gold = getattr(load_module(problem["module"], problem["domain"]), "gold_answer", None)
    return None if gold is None else gold(problem["problem"])


def check_config(config: Any) -> None:
    """Let each domain of the mix check the configuration."""
    for part in read_parts(config.dataset_loader_params.get("domains", {})):
        check = getattr(load_module(part.module, part.name), "check_config", None)
        if check is not None:
            check(config)
