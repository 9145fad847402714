"""`python -m pipelinerl.sandbox.environment_main --run-dir DIR --job environment_0`: an environment service of a run.

Started by the launcher when `environment` is set and `world.env_replicas` is above 0. Serves until it is stopped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pipelinerl.role import run_role

if TYPE_CHECKING:
    from pipelinerl.role import RoleContext


def main(context: RoleContext) -> None:
    """Serve the application that the key `environment` describes."""
    from pipelinerl.sandbox.environment_target import make_app
    from pipelinerl.sandbox.verifier_main import serve_guarded

    if context.config.environment is None:
        raise ValueError(f"{context.job.name}: the run has no environment, expected the key environment")
    serve_guarded(make_app(context.config.environment), context)


if __name__ == "__main__":
    sys.exit(run_role(main))
