"""The application of an environment service: what the key `environment` describes. Imports user code.

Called by the check before a run and by `environment_main`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError

KEY = "environment"
TARGET_KEY = "_target_"
_HEALTH_PATH = "/health"
_EXPECTED = "a function or class that is called with the other keys of `environment` and returns an ASGI application"
App = Callable[..., Awaitable[None]]


def find_target(environment: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what `environment._target_` names, checked to take the other keys.

    Raises:
        DomainError: there is no such thing, or it does not take them.
    """
    path = environment.get(TARGET_KEY)
    if not isinstance(path, str) or "." not in path:
        raise DomainError(
            f"{KEY}.{TARGET_KEY}: got {path!r}, expected the dotted path of {_EXPECTED}. For text games: "
            "pipelinerl.sandbox.game_app.create_app. Or set world.env_replicas=0."
        )
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise DomainError(
            f"{KEY}.{TARGET_KEY}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise DomainError(f"{KEY}.{TARGET_KEY}: {module_name} has no {name!r}, expected {_EXPECTED}.")
    try:
        inspect.signature(found).bind(**_settings(environment))
    except TypeError as error:
        raise DomainError(f"{KEY}: {path} does not take {sorted(_settings(environment))}: {error}") from error
    except ValueError:  # a built-in without a signature
        pass
    return found


def check_environment(config: RunConfig) -> None:
    """Check before a run that its environment service can be made. Raises DomainError."""
    if config.environment is not None and config.world.env_replicas > 0:
        find_target(config.environment)


def make_app(environment: Mapping[str, Any]) -> App:
    """Return the application, with `/health` in front of it.

    Raises:
        DomainError: it cannot be made, or is no application.
    """
    made = find_target(environment)(**_settings(environment))
    if not callable(made):
        raise DomainError(f"{KEY}: {environment[TARGET_KEY]} returned a {type(made).__name__}, expected {_EXPECTED}.")
    return _with_health(made)


def _settings(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in environment.items() if key != TARGET_KEY}


def _with_health(app: App) -> App:
    """Answer `/health` before the application does: it may be a stranger's."""

    async def serve(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == _HEALTH_PATH:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return serve
