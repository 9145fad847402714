"""One trainer rank: `python -m pipelinerl.finetune.main --run-dir DIR --job finetune_0`.

Started by the launcher with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Exit code 0 means that
training is complete: the servers and `finetune/current` have the final weights. On SIGTERM it saves a training state
after the current step and exits with 143.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import NoReturn

from pipelinerl.config.schedule import update_interval
from pipelinerl.role import RoleContext, quick_imports, run_role

EXIT_STOPPED = 128 + signal.SIGTERM


def main(context: RoleContext) -> None:
    """Train to the end."""
    # Here, as torch must not be loaded before the heartbeat runs.
    with quick_imports():
        from pipelinerl.finetune.loop import run_trainer

    config = context.config
    if not run_trainer(context, os.environ).is_complete(config.finetune, update_interval(config)):
        raise SystemExit(EXIT_STOPPED)


def end_process(code: int) -> NoReturn:
    """Flush all output and end a process that has or had a gloo group, without finalizing the interpreter.

    torch (seen with 2.13) frees DDP's reducer while holding the interpreter's lock. If that frees the group too, its
    threads are joined, and one of them may need that lock to drop the tensors of the last collective: a deadlock.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        exit_code = run_role(main)
    except SystemExit as stopped:
        exit_code = int(stopped.code or 0)
    end_process(exit_code)
