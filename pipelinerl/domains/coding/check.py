"""Refuses a run whose programs could not be isolated. Called by the check before a run; tries the sandbox once."""

from __future__ import annotations

import os
from typing import Any

from pipelinerl.domains.coding.limits import SandboxUnavailableError
from pipelinerl.domains.coding.sandbox import check_isolation
from pipelinerl.errors import ConfigError

ENDPOINT_KEY = "SANDBOX_ENDPOINT"


def sandbox_endpoint(config: Any) -> str | None:
    """Return the SandboxFusion server to use: `sandbox_endpoint`, else the environment's; None: the local sandbox."""
    return config.sandbox_endpoint or os.environ.get(ENDPOINT_KEY) or None


def check_config(config: Any) -> None:
    """Check that programs can be run.

    Raises:
        ConfigError: there is neither a server nor a way to isolate programs here.
    """
    if sandbox_endpoint(config) is not None:
        return
    try:
        check_isolation()
    except SandboxUnavailableError as error:
        raise ConfigError(
            "sandbox_endpoint", None, "a server, or a machine that can isolate programs", str(error)
        ) from error
