"""`python -m pipelinerl.sandbox.verifier_main --run-dir DIR --job verifier_0`: the verifier service of a run.

Started by the launcher when `world.verifier_replicas` is above 0. Serves until it is stopped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pipelinerl.role import run_role

if TYPE_CHECKING:
    from pipelinerl.role import RoleContext


def main(context: RoleContext) -> None:
    """Serve the graders that rollouts name."""
    from pipelinerl.sandbox.client import local_pool
    from pipelinerl.sandbox.verifier_app import create_app

    config = context.config.verifier
    serve_guarded(create_app(local_pool(config), config.max_queue), context)


def serve_guarded(app: Any, context: RoleContext) -> None:
    """Serve `app` on the job's address behind the token check, until SIGTERM."""
    import uvicorn

    from pipelinerl.inference.auth import TokenMiddleware

    job = context.job
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
