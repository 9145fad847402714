"""`python -m pipelinerl.actor.main --run-dir DIR --job actor_0`: the process that produces rollouts.

Started by the launcher. Loads the problems, starts the rollout workers, and runs until training is complete.
"""

from __future__ import annotations

import gc
import os
import sys

from pipelinerl.role import DEATH_FD_KEY, RoleContext, run_role

# Objects made before the collector looks at the young ones (default 700), and rounds before it looks at older ones.
_GC_THRESHOLDS = (20_000, 20, 20)


def main(context: RoleContext) -> None:
    """Run the actor of `context`'s run."""
    import uvloop

    from pipelinerl.actor.loop import run_actor
    from pipelinerl.actor.pool import WorkerPool, worker_command
    from pipelinerl.domains.problem_sets import load_problem_sets

    with context.heartbeat.waiting("the dataset loader"):
        problems = load_problem_sets(context.config)
    # What is loaded by now stays; rollouts make many small objects that no cycle holds.
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    death_fd = os.environ.get(DEATH_FD_KEY)
    pool = WorkerPool(
        worker_command(str(context.run_dir.root), context.job.name),
        context.config.actor.rollout_workers,
        inherited_fds=[int(death_fd)] if death_fd else [],
    )
    uvloop.run(run_actor(context, problems, pool))


if __name__ == "__main__":
    sys.exit(run_role(main))
