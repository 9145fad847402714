"""Names of the policy's parameters as its checkpoint and the servers know them."""

from __future__ import annotations

from pipelinerl.finetune.policy import LANGUAGE_MODEL

_PREFIX = f"{LANGUAGE_MODEL}."


def checkpoint_name(name: str) -> str | None:
    """Checkpoint name of a policy parameter; None for what the servers never see (the value head)."""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
