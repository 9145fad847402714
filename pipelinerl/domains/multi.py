"""A weighted mix of domains, with metrics for each of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.domains.data import check_names
from pipelinerl.domains.user_task import gold_score
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

_KEY = "multi: dataset_loader_params.domains"
#: The mix where none is given. In the configuration file it would be merged with the user's.
_DOMAINS = {"counting": 1, "countdown": 1, "math": 2}


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One domain of the mix. `train` and `test` are its data set names."""

    weight: Annotated[float, msgspec.Meta(gt=0, lt=1e12)] = 1.0
    module: str = ""
    rollout: str | None = None
    train: list[Any] = msgspec.field(default_factory=lambda: ["train"])
    test: list[Any] = msgspec.field(default_factory=lambda: ["test"])
    params: dict[str, Any] | None = None


def read_parts(domains: Mapping[str, Any]) -> dict[str, Part]:
    """Read `domains`: name -> weight, or name -> {weight, module, rollout, train, test, params}.

    The module of a name is `pipelinerl.domains.NAME` unless `module` names another one; its rollout function is
    `generate_rollout` or `generate_NAME_rollout` unless `rollout` gives a dotted path.

    Raises:
        DomainError: something is unknown, or a weight is no positive number.
    """
    if not isinstance(domains, Mapping) or not domains:
        raise DomainError(f"{_KEY}: got {domains!r}, expected a mapping from names of domains to weights.")
    parts = {}
    for name, given in domains.items():
        try:
            part = msgspec.convert(dict(given) if isinstance(given, Mapping) else {"weight": given}, Part)
        except msgspec.ValidationError as error:
            raise DomainError(f"{_KEY}.{name}: got {given!r}: {error}. Correct or remove it.") from error
        part.module = part.module or f"pipelinerl.domains.{name}"
        part.rollout = part.rollout or _find_rollout(part.module, str(name))
        parts[str(name)] = part
    return parts


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


def load_problems(dataset_names: Sequence[str], *, domains: Mapping[str, Any] = _DOMAINS) -> list[dict[str, Any]]:
    """Return the problems of all domains for the names `train` and `test`.

    Args:
        domains: name -> weight, or name -> {weight, module, rollout, train, test, params}.

    Raises:
        DomainError: see `read_parts`; or a domain has no problem.
    """
    check_names("multi", dataset_names)
    parts = read_parts(domains)
    total = sum(part.weight for part in parts.values())
    problems = []
    for split in dataset_names:
        for name, part in parts.items():
            names = part.train if split == "train" else part.test
            own = load_module(part.module, name).load_problems(names, **(part.params or {}))
            if any("share" in problem for problem in own):
                raise DomainError(
                    f"{_KEY}.{name}: a data set has a share, which is for runs of one domain. Give the module a second "
                    "name here, with a weight and data sets of its own."
                )
            if not own and names:
                raise DomainError(f"multi: domain {name!r} has no problem for {names}. Change its data sets.")
            problems += [_wrapped(problem, name, part, part.weight / total) for problem in own]
    return problems


def _wrapped(problem: dict[str, Any], name: str, part: Part, share: float) -> dict[str, Any]:
    own_dataset = str(problem.get("dataset", name))
    wrapped = {
        "dataset": name if own_dataset in ("train", "test", "default", name) else f"{name}/{own_dataset}",
        "domain": name,
        "share": share,
        "module": part.module,
        "rollout": part.rollout,
        "problem": problem,
    }
    return wrapped if problem.get("id") is None else wrapped | {"id": f"{name}/{problem['id']}"}


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
    for name, part in read_parts(config.dataset_loader_params.get("domains", _DOMAINS)).items():
        check = getattr(load_module(part.module, name), "check_config", None)
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
