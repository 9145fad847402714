"""A weighted mix of domains, with metrics for each of them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.data import check_names
from pipelinerl.domains.registry import gold_score
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

_KEY = "multi: dataset_loader_params.domains"
_KNOWN = {"name", "weight", "module", "train", "test", "params", "rollout"}


@dataclass(frozen=True)
class Part:
    """One domain of the mix. `share` is its weight over the sum of weights; `train` and `test` are data set names."""

    name: str
    share: float
    module: str
    rollout: str
    train: list[Any]
    test: list[Any]
    params: dict[str, Any]


def read_parts(domains: Mapping[str, Any]) -> list[Part]:
    """Read `domains`: name -> weight, or name -> {weight, module, rollout, train, test, params}.

    The module of a name is `pipelinerl.domains.NAME` unless `module` names another one; its rollout function is
    `generate_rollout` or `generate_NAME_rollout` unless `rollout` gives a dotted path.

    Raises:
        DomainError: something is unknown, or a weight is no positive number.
    """
    if not isinstance(domains, Mapping) or not domains:
        raise DomainError(f"{_KEY}: got {domains!r}, expected a mapping from names of domains to weights.")
    settings = {name: dict(each) if isinstance(each, Mapping) else {"weight": each} for name, each in domains.items()}
    weights = {}
    for name, each in settings.items():
        unknown = set(each) - _KNOWN
        if unknown:
            raise DomainError(f"{_KEY}.{name}: unknown keys {sorted(unknown)}, expected some of {sorted(_KNOWN)}.")
        weight = each.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise DomainError(f"{_KEY}.{name}: got weight {weight!r}, expected a number above 0. Remove it otherwise.")
        weights[name] = float(weight)
    total = sum(weights.values())
    return [_part(str(name), each, weights[name] / total) for name, each in settings.items()]


def _part(name: str, settings: dict[str, Any], share: float) -> Part:
    module = str(settings.get("module", f"pipelinerl.domains.{name}"))
    return Part(
        name=name,
        share=share,
        module=module,
        rollout=str(settings.get("rollout") or _find_rollout(module, name)),
        train=list(settings.get("train", ["train"])),
        test=list(settings.get("test", ["test"])),
        params=dict(settings.get("params") or {}),
    )


def _find_rollout(module: str, name: str) -> str:
    loaded = load_module(module, name)
    names = ("generate_rollout", f"generate_{module.rpartition('.')[2]}_rollout")
    # A domain may load its rollout function late: looking at `__all__` does not load it.
    offered = {*vars(loaded), *getattr(loaded, "__all__", ())}
    found = next((each for each in names if each in offered), None)
    if found is None:
        raise DomainError(f"{_KEY}.{name}: {module} has none of {', '.join(names)}. Set rollout to its dotted path.")
    return f"{module}.{found}"


def load_module(module: str, name: str) -> ModuleType:
    """Import the module of a domain.

    Raises:
        DomainError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DomainError(
            f"{_KEY}.{name}: importing {module} failed: {error}. Expected the name of a built-in domain, or `module` "
            "with the module of your own."
        ) from error


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


async def generate_multi_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Run the domain's rollout function; its metrics are reported under the domain's name."""
    module, _, name = problem["rollout"].rpartition(".")
    generate_rollout = getattr(importlib.import_module(module), name)
    result: RolloutResult = await generate_rollout(cfg, llm, problem["problem"], session)
    result.dataset_name = problem["dataset"]
    result.domain = problem["domain"]
    return result
