"""A launcher over several nodes on Ray whose jobs are small Python scripts: `ray_run.py RUN_DIR JOBS_JSON [KEYS_JSON]`.

It is started on every node with WORLD_SIZE, RANK, MASTER_ADDR, NODE_PORT and MODEL_PATH, or on one node of a Ray
cluster with keys of `world` in WORLD. JOBS_JSON maps `NODE:JOB` to source text; everything else is as in a real run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pipelinerl.launch as launch_module
from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, PipelineRLError, UserError
from pipelinerl.launch import found_nodes, launch, load_bring_up, supervise
from pipelinerl.role import JOB_KEY
from pipelinerl.run.node import Place
from pipelinerl.run.processes import Event, Outcome, signals_as_events
from pipelinerl.run.start import Command, RunSession, enter
from pipelinerl.world import ClusterMember, ClusterNode, Job, WorldMap


def main(root: str, jobs: dict[str, str], keys: dict[str, Any]) -> int:
    config = RunConfig.model_validate(
        {
            "output_dir": root,
            "model_path": os.environ["MODEL_PATH"],
            "debug": {"mode": "actor"},  # no trainer whose last message counts
            "wandb": {"mode": "disabled"},
            "world": {"node_port": int(os.environ["NODE_PORT"]), **json.loads(os.environ.get("WORLD", "{}"))},
            "supervise": {"heartbeat_interval_s": 1, "heartbeat_timeout_s": 10, **keys},
        }
    )
    member, machine = ClusterMember.from_env(os.environ, config.world.cluster), ClusterNode("127.0.0.1", (), 1)

    def supervised(
        composed: Any, config: RunConfig, place: Place, events: SimpleQueue[Event], restarts: Sequence[str]
    ) -> Outcome:
        commands = []
        for where, source in jobs.items():
            node, _, name = where.partition(":")
            kind, _, idx = name.rpartition("_")
            host = place.cluster.hosts[int(node)]
            job = Job(kind, name, int(idx), int(idx), int(node), host, [], None, None, None, 1)
            argv = (sys.executable, "-c", source, root, name)
            commands.append(Command(job, argv, {JOB_KEY: name, "PYTHONFAULTHANDLER": "1"}))
        world = WorldMap([command.job for command in commands], "cpu", 2, place.cluster.hosts[0], 29500)
        with signals_as_events(events), enter(config) as entered:
            logging.basicConfig(level=logging.INFO, filename=entered.run_dir.launch_log)
            save_config(config, entered.run_dir.config_file)
            entered.run_dir.world_file.write_text(world.to_json(), encoding="utf-8")
            session = RunSession(
                config, world, entered.run_dir, entered.identity, commands, os.environ, "token-of-test", events
            )
            return supervise(session, place.open)

    launch_module._supervised = supervised
    try:
        if member.rank > 0:
            return int(load_bring_up(member).serve_node(config, member, machine))
        with found_nodes(config, member, machine) as find:
            return launch(SimpleNamespace(), config, find)  # type: ignore[arg-type]
    except PipelineRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_FAILED


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3] if sys.argv[3:] else "{}")))
