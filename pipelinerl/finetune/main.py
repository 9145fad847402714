"""One trainer rank: `python -m pipelinerl.finetune.main --run-dir DIR --job finetune_0`.

Started by the launcher with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Exit 0 means that training
is complete: the final weights are with the servers and in `finetune/current`. SIGTERM makes it save a training state
behind the present step and end with exit code 143.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from pipelinerl.role import run_role

if TYPE_CHECKING:
    from pipelinerl.role import RoleContext


def main(context: RoleContext) -> None:
    """Train to the end (heavy imports happen here, after the arguments were checked)."""
    from pipelinerl.config.schedule import update_interval
    from pipelinerl.finetune.data_feed import EXIT_STOPPED
    from pipelinerl.finetune.loop import run_trainer

    config = context.config
    if not run_trainer(context, os.environ).is_complete(config.finetune, update_interval(config)):
        raise SystemExit(EXIT_STOPPED)


def run() -> NoReturn:
    """Run the role and end the process at once: the interpreter's own end can hang in torch (see `end_process`)."""
    try:
        code = run_role(main)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    if "torch" in sys.modules:
        from pipelinerl.finetune.ranks import end_process

        end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
