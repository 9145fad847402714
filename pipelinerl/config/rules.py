"""Rules that compare keys of different sections. Called by the composition after the types are right."""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.config.messages import raise_faults
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

Rule = Callable[[RunConfig], ConfigError | None]
RULES: tuple[Rule, ...] = ()


def validate(config: RunConfig) -> None:
    """Raise one `ConfigError` with a line for each broken rule."""
    raise_faults([fault for fault in (rule(config) for rule in RULES) if fault is not None])
