"""The secret by which the launchers of a run know each other: in their environments and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from pipelinerl.errors import ConfigError
from pipelinerl.placement.slurm import is_slurm_step
from pipelinerl.role import NODE_SECRET_KEY

_MIN_CHARACTERS = 16


def node_secret(environ: Mapping[str, str]) -> bytes:
    """The secret as bytes; ConfigError if there is none or it is too short."""
    secret = environ.get(NODE_SECRET_KEY, "")
    if len(secret) < _MIN_CHARACTERS:
        raise ConfigError(
            NODE_SECRET_KEY,
            f"{len(secret)} characters" if secret else None,
            f"at least {_MIN_CHARACTERS} characters, the same on every node (WORLD_SIZE is above 1)",
            f"Make one with `openssl rand -hex 16` and export {NODE_SECRET_KEY} on all nodes.{_on_slurm(environ)}",
        )
    return secret.encode()


def _on_slurm(environ: Mapping[str, str]) -> str:
    """Whoever wrote an own script for SLURM may not have meant one run over several nodes."""
    if not is_slurm_step(environ):
        return ""
    return " `srun` started this on several nodes: see scripts/slurm.sbatch, or set WORLD_SIZE=1 for a run on each."
