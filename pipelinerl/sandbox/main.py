"""Main of the verifier and environment services: `python -m pipelinerl.sandbox.main --run-dir DIR --job verifier_0`.

The environment service is the ASGI application that the key `environment` describes. Both serve until they are stopped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import uvicorn

from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError
from pipelinerl.inference.auth import TokenMiddleware
from pipelinerl.role import RoleContext, run_role
from pipelinerl.sandbox.protocol import load_named
from pipelinerl.sandbox.services import local_pool

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
            "pipelinerl.games.create_app. Or set world.env_replicas=0."
        )
    found: Callable[..., Any] = load_named(path, f"{KEY}.{TARGET_KEY}", _EXPECTED)
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
    return with_health(made)


def _settings(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in environment.items() if key != TARGET_KEY}


def with_health(app: App) -> App:
    """Return the application with an answer to `/health` in front of it."""

    async def serve(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == _HEALTH_PATH:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return serve


def main(context: RoleContext) -> None:
    """Serve the application of this job behind the token check, until SIGTERM."""
    # The check before a run imports this module and needs no FastAPI.
    from pipelinerl.sandbox.service import verifier_app

    config, job = context.config, context.job
    app: Any
    if job.kind == "verifier":
        app = with_health(verifier_app(local_pool(config.verifier)))
    elif config.environment is not None:
        app = make_app(config.environment)
    else:
        raise ValueError(f"{job.name}: the run has no environment, expected the key environment")
    if job.port is None:
        raise ValueError(f"{job.name}: got no port in the world plan, expected one for a server")
    uvicorn.run(
        TokenMiddleware(app, context.token),
        host=job.host,
        port=job.port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    sys.exit(run_role(main))
