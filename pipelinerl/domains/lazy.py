"""Lets a domain name its rollout function without loading the client of the servers before it is used.

Grader processes import domains too, and should start quickly. Pure.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazy_names(package: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`: name -> the object of that name in the submodule `modules[name]`."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
