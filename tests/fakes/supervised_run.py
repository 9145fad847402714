"""A launcher whose jobs are small Python scripts: `supervised_run.py RUN_DIR JOBS_JSON [SUPERVISE_JSON [BACKEND]]`.

JOBS_JSON maps job names to source text, or to `!` and the path of a program. Used by the tests of
supervision; everything else is as in a real run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.launch import supervise
from pipelinerl.role import JOB_KEY
from pipelinerl.run.processes import Event, signals_as_events
from pipelinerl.run.start import Command, RunSession, enter
from pipelinerl.world import Job, WorldMap


def main(root: str, jobs: dict[str, str], supervise_section: dict[str, Any], backend: str) -> int:
    config = RunConfig.model_validate(
        {
            "output_dir": root,
            "supervise": {"heartbeat_interval_s": 0.2, **supervise_section},
            "streams": {"backend": backend},
            "wandb": {"mode": "disabled"},
        }
    )
    commands = []
    for name, source in jobs.items():
        kind, _, idx = name.rpartition("_")
        job = Job(kind, name, int(idx), int(idx), 0, "127.0.0.1", [], None, None, None, 1)
        argv = (source[1:],) if source.startswith("!") else (sys.executable, "-c", source, root, name)
        commands.append(Command(job, argv, {JOB_KEY: name, "PYTHONFAULTHANDLER": "1"}))
    world = WorldMap([command.job for command in commands], "cpu", 1, "127.0.0.1", 29500)
    events: SimpleQueue[Event] = SimpleQueue()
    with signals_as_events(events), enter(config) as entered:
        logging.basicConfig(level=logging.INFO, filename=entered.run_dir.launch_log)
        session = RunSession(
            config, world, entered.run_dir, entered.identity, commands, os.environ, "token-of-test", events
        )
        return supervise(session).exit_code


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    more = sys.argv[3:]
    sys.exit(
        main(
            sys.argv[1],
            json.loads(sys.argv[2]),
            json.loads(more[0] if more else "{}"),
            more[1] if len(more) > 1 else "files",
        )
    )
