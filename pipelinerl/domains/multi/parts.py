"""The domains of a mix: their weights, and where their functions are. Called by loader and rollout.

Waits for imports.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pipelinerl.errors import DomainError

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
