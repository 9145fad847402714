"""The part of a run that a node above 0 starts: its own jobs, supervised until node 0 or one of them ends the run.

Called by `following`. Waits where the supervisor waits. Summary, metrics and the pool of servers are node 0's; a server
that dies here is not started again in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from queue import SimpleQueue

from pipelinerl.config import RunConfig
from pipelinerl.records import TrainerMessage
from pipelinerl.run.completion import TrainingCompletion
from pipelinerl.run.last_save import OtherLaunchers
from pipelinerl.run.monitor import StuckMonitor
from pipelinerl.run.policy import ExitPolicy
from pipelinerl.run.processes import Event, become_subreaper
from pipelinerl.run.server_keeper import ServerKeeper
from pipelinerl.run.session import START_GRACE_S
from pipelinerl.run.start import Command, server_sockets
from pipelinerl.run.supervisor import Outcome, Supervisor
from pipelinerl.rundir.identity import RunIdentity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import SERVER_KINDS


def supervise_node(
    config: RunConfig,
    run_dir: RunDir,
    identity: RunIdentity,
    commands: Sequence[Command],
    environ: Mapping[str, str],
    token: str,
    events: SimpleQueue[Event],
    node_0: OtherLaunchers,
) -> Outcome:
    """Start this node's jobs and block until the run is over and all of them are gone.

    `node_0` hears how it ended before they are gone: the other nodes should not wait for that.
    """
    hub = StreamHub(config.streams, run_dir, identity.run_id, environ)
    reader = hub.reader(TRAINER_TOPIC, "finetune_0", TrainerMessage)
    become_subreaper()
    death_read, death_write = os.pipe()
    without_restarts = config.supervise.model_copy(update={"max_server_restarts": 0})
    jobs = [command.job for command in commands]
    with ExitStack() as stack:
        stack.callback(os.close, death_read)
        stack.callback(os.close, death_write)
        return Supervisor(
            commands=commands,
            run_dir=run_dir,
            config=without_restarts,
            policy=ExitPolicy(jobs, TrainingCompletion(reader, identity.incarnation), ends_run=False),
            monitor=StuckMonitor(config.supervise, START_GRACE_S + config.supervise.heartbeat_timeout_s),
            environ=stack.enter_context(server_sockets(environ)),
            token=token,
            death_fd=death_read,
            events=events,
            keeper=ServerKeeper(
                [job for job in jobs if job.kind in SERVER_KINDS],
                without_restarts,
                config.vllm_config.start_timeout_s,
                announce=lambda change: None,
                incarnation=identity.incarnation,
                now=time.time(),
                node_rank=commands[0].job.node_rank if commands else 0,
            ),
            takes_requests=False,
            others=node_0,
        ).run()
