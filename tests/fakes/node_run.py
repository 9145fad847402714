"""The launcher of a node above 0 whose jobs are small Python scripts: `node_run.py RUN_DIR`.

Its trainer rank ends at once. Node 0 ends the run only after this node has said that the rank is done, and after
one more event; then this prints how the run ended here and whether its server still lived then.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from queue import SimpleQueue

import psutil

from pipelinerl.config import RunConfig
from pipelinerl.records import ServerDropped
from pipelinerl.role import JOB_KEY
from pipelinerl.run.nodes import Peers
from pipelinerl.run.processes import Event, NodeEnded, PoolAnswered
from pipelinerl.run.session import supervise_jobs
from pipelinerl.run.start import Command, RunSession
from pipelinerl.rundir.layout import RunDir, RunIdentity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import Job, WorldMap

JOBS = {"actor_llm_1": "import time; time.sleep(300)", "finetune_1": "pass"}


class EndsWhenTheRankIsDone(logging.Handler):
    """Node 0: sees the rank's end, and whether this node's server lives then."""

    def __init__(self, events: SimpleQueue[Event]) -> None:
        super().__init__()
        self._events = events
        self.server_lives: bool | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "finetune_1 is done":
            self.server_lives = any("time.sleep" in " ".join(p.cmdline()) for p in psutil.Process().children())
            self._events.put(PoolAnswered(ServerDropped(name="another", generation=0, error="", time=0.0)))
            self._events.put(NodeEnded("completed", None, 0))


def main(root: str) -> None:
    config = RunConfig.model_validate(
        {"output_dir": root, "supervise": {"finish_timeout_s": 1e-6}, "wandb": {"mode": "disabled"}}
    )
    commands = []
    for name, source in JOBS.items():
        job = Job(name.rpartition("_")[0], name, 1, 0, 1, "127.0.0.2", [], None, None, None, 1)
        commands.append(Command(job, (sys.executable, "-c", source), {JOB_KEY: name}))
    events: SimpleQueue[Event] = SimpleQueue()
    node_0 = EndsWhenTheRankIsDone(events)
    logging.getLogger("pipelinerl").setLevel(logging.INFO)
    logging.getLogger("pipelinerl").addHandler(node_0)
    identity = RunIdentity(run_id="run-test", incarnation=0)
    world = WorldMap([command.job for command in commands], "cpu", 2, 1, "127.0.0.1", 29500)
    session = RunSession(config, world, RunDir(Path(root)), identity, commands, os.environ, "token-of-test", events)
    outcome = supervise_jobs(session, StreamHub(config.streams, session.run_dir, "run-test"), Peers(1))
    sys.stdout.write(f"{outcome.status} {node_0.server_lives}\n")


if __name__ == "__main__":
    main(sys.argv[1])
