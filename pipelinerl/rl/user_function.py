"""Functions and classes of the user, by dotted path: losses, advantages, lag policies. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.errors import ConfigError

# Versions of `AdvantageInputs`, `LossInputs`, and `LagPolicy` with what it sees of `SampleBudget` (actor/budget.py),
# incremented by changes that break user functions.
ADVANTAGE_API_VERSION = 1
LOSS_API_VERSION = 1
LAG_POLICY_API_VERSION = 1


def load_function(key: str, path: str, api_version: int) -> Callable[..., Any]:
    """Import a function or class, `package.module.name`.

    An attribute `api_version` states the version of the inputs record that it was written for.

    Args:
        key: the configuration key that names the function.

    Raises:
        ConfigError: it is not callable or was written for another version.
    """
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            key, path, "the dotted path of a function or class that can be imported", f"The import failed: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(
            key, path, f"a function or class in {module_name}", f"{module_name} has none called {name!r}."
        )
    wanted = getattr(function, "api_version", api_version)
    if wanted != api_version:
        raise ConfigError(
            key,
            path,
            f"a function for api_version {api_version}",
            f"It says {wanted}; adapt it to version {api_version}.",
        )
    return function


def check_user_functions(rl: RLConfig) -> None:
    """Import the user functions that `rl` names, so that mistakes surface before anything starts.

    Raises:
        ConfigError: see `load_function`.
    """
    for key, path, api_version in (
        ("finetune.rl.policy_loss", rl.policy_loss, LOSS_API_VERSION),
        ("finetune.rl.advantage_estimator", rl.advantage_estimator, ADVANTAGE_API_VERSION),
    ):
        if "." in path:
            load_function(key, path, api_version)
