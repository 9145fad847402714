"""Refuses a run whose programs could not be isolated. Called by the check before a run; tries the sandbox once.

Waits for that one program, and a few seconds for a server that does not answer.
"""

from __future__ import annotations

import os
from typing import Any

from pipelinerl.domains.coding.fusion import Patience, is_endpoint, run_remotely
from pipelinerl.domains.coding.limits import SandboxUnavailableError
from pipelinerl.domains.coding.sandbox import check_isolation
from pipelinerl.errors import ConfigError, RetryableRolloutError

ENDPOINT_KEY = "SANDBOX_ENDPOINT"
_PATIENCE_S = 5.0


def sandbox_endpoint(config: Any) -> str | None:
    """Return the SandboxFusion server to use: `sandbox_endpoint`, else the environment's; None: the local sandbox."""
    named = None if config is None else config.sandbox_endpoint
    return named or os.environ.get(ENDPOINT_KEY) or None


def check_config(config: Any) -> None:
    """Check that programs can be run.

    Raises:
        ConfigError: there is neither a server that runs them nor a way to isolate programs here.
    """
    endpoint = sandbox_endpoint(config)
    if endpoint is not None:
        _check_server(endpoint, "sandbox_endpoint" if config.sandbox_endpoint else ENDPOINT_KEY)
        return
    try:
        check_isolation()
    except SandboxUnavailableError as error:
        raise ConfigError(
            "sandbox_endpoint", None, "a server, or a machine that can isolate programs", str(error)
        ) from error


def _check_server(endpoint: str, key: str) -> None:
    expected = "the address of a SandboxFusion server that runs programs"
    if not is_endpoint(endpoint):
        # With a user name there may be a password, which is not for the terminal and the log.
        shown = "(hidden: it has a user name or a password)" if "@" in endpoint else endpoint
        raise ConfigError(key, shown, expected, "Write it as http://HOST:PORT.")
    try:
        run = run_remotely(endpoint, "print(6 * 7)", patience=Patience(_PATIENCE_S))
    except (SandboxUnavailableError, RetryableRolloutError) as error:
        raise ConfigError(key, endpoint, expected, str(error)) from error
    if run.ending != "finished" or run.stdout.strip() != "42":
        raise ConfigError(key, endpoint, expected, f"A first program, print(6 * 7), ended with {run}.")
