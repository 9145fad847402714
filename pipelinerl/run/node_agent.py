"""The launcher's hand on one node of a Ray cluster: `NodeAgent`, an actor in a process of its own there.

It starts, sees and ends the jobs of its node with the code of a single machine (`LocalNode`). The launcher asks it for
a `Report` again and again: an agent that does not answer is a node that is gone, and an agent that nobody asks ends.
Its jobs end with it, because it holds their death pipe.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec

from pipelinerl.config.load import load_config
from pipelinerl.errors import ConfigError, UserError
from pipelinerl.role import LOG_FORMAT
from pipelinerl.run.last_error import LogPart
from pipelinerl.run.node import LocalNode, Sighting, local_node
from pipelinerl.run.preflight import Start, check_node
from pipelinerl.run.processes import Child, Event, Outcome, signal_process
from pipelinerl.run.start import Command
from pipelinerl.rundir.layout import RunDir, RunIdentity, read_identity
from pipelinerl.version import __version__
from pipelinerl.world import (
    Cluster,
    ClusterNode,
    WorldMap,
    can_bind,
    memory_of_machine,
    usable_cores,
)

logger = logging.getLogger(__name__)
#: The folder for messages between the agent and the launcher of this node, if that brought Ray up: the outcome of the
#: run, and the signal that the launcher got (0: none), once an agent reads it.
NODE_FOLDER_KEY = "PIPELINERL_NODE_FOLDER"
_OUTCOME, _SIGNAL, _OUTCOME_BYTES = "outcome.json", "signal", 8192
#: How long `leave` waits for what the jobs of the node shared to end; the launcher waits 30 s for `leave`.
_CLOSE_S = 20.0
# Those of a Ray worker are not for jobs: they would connect to it, or take its number of threads.
_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS")


class Facts(NamedTuple):
    """What an agent says of its node. `busy_ports` are those that were asked for and cannot be bound."""

    version: str
    machine: ClusterNode
    busy_ports: list[int]


class Report(NamedTuple):
    """What an agent sees, by process id: how jobs ended, and the living ones. `signum`: the signal that the launcher of
    this node got."""

    exits: dict[int, int]
    seen: dict[int, Sighting]
    signum: int | None


class NodeAgent:
    """The jobs of one node. The launcher calls the methods, several at a time.

    Args:
        host: address of the node.
        num_gpus: how many GPUs Ray reserved, which are then those of CUDA_VISIBLE_DEVICES.
        num_cpus: how many cores.
        silence_s: how long the launcher may say nothing once jobs may be started.
    """

    def __init__(self, host: str, num_gpus: int, num_cpus: int, silence_s: float) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if num_gpus else ""
        cores = min(usable_cores(), num_cpus)
        machine = ClusterNode.from_env({"CUDA_VISIBLE_DEVICES": visible}, cores, host)
        self._machine = replace(machine, host_bytes=memory_of_machine())
        self._silence_s = silence_s
        self._heard_at = 0.0
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._children: dict[int, Child] = {}
        self._stack = ExitStack()
        self._node: LocalNode | None = None

    def describe(self, ports: list[int]) -> Facts:
        return Facts(__version__, self._machine, [port for port in ports if not can_bind(port)])

    def begin(
        self,
        rank: int,
        root: str,
        identity: RunIdentity,
        num_nodes: int,
        token: str,
        launchers_environ: dict[str, str],
        folder: str,
    ) -> str | None:
        """Make ready to start jobs of the run in `root`. Returns why this node cannot. `folder`: where the launcher
        works."""
        with suppress(OSError):  # relative paths mean what they mean at the launcher, where that folder is here
            os.chdir(folder)
        try:
            run_dir = _seen_run(root, identity)
            logfile = run_dir.root / f"launch_node_{rank}.log"
            logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=logfile, force=True)
            own = {key: value for key, value in os.environ.items() if not key.startswith(_RAYS_OWN)}
            # What was set on a node is meant for it; our own variables are those of the run.
            run = {key: value for key, value in launchers_environ.items() if key.startswith("PIPELINERL_")}
            environ = {**launchers_environ, **own, **run}
            config, world = load_config(run_dir.config_file), WorldMap.from_json(run_dir.world_file.read_bytes())
            check_node(Start(config, Cluster((self._machine,) * num_nodes), environ))
            if folder_here := os.environ.get(NODE_FOLDER_KEY):
                _make_files(Path(folder_here))
            jobs = [job for job in world.jobs if job.node_rank == rank]
            self._node = self._stack.enter_context(local_node(config, jobs, run_dir, environ, token, self._events))
        except UserError as error:
            return str(error)
        self._heard_at = time.monotonic()
        threading.Thread(target=self._await_silence, name="silence", daemon=True).start()
        return None

    def start(self, command: Command) -> tuple[int, LogPart, LogPart]:
        """Start a job with this node's Python: its process id and logs. Raises OSError if it cannot be started."""
        assert self._node is not None
        child = self._node.start(replace(command, argv=(sys.executable, *command.argv[1:])))
        self._children[child.pid] = child
        return child.pid, child.stdout, child.stderr

    def signal(self, pid: int, signum: int, to_group: bool) -> None:
        if self._children[pid].is_alive:
            signal_process(pid, signum, to_group)

    def report(self, wait_s: float) -> Report:
        """What there is to see, as soon as a job has ended, or after `wait_s`. It repeats all ends, because an answer
        may be lost."""
        self._heard_at = time.monotonic()
        with suppress(Empty):
            self._events.get(timeout=wait_s)
        children = list(self._children.items())
        exits = {pid: child.returncode for pid, child in children if child.returncode is not None}
        node = self._node
        seen = {pid: node.look(child) for pid, child in children if pid not in exits and node is not None}
        folder, signum = os.environ.get(NODE_FOLDER_KEY), 0
        if folder is not None and node is not None:
            signum = int((Path(folder) / _SIGNAL).read_text(encoding="ascii"))
        return Report(exits, seen, signum or None)

    def end_rest(self, pid: int) -> None:
        if self._node is not None:
            self._node.end_rest(self._children[pid])

    def end_all(self, grace_s: float) -> list[int]:
        return self._node.end_all(grace_s) if self._node is not None else []

    def leave(self, outcome: Outcome | None) -> None:
        """No more jobs. `outcome` is the run's, if it is over: the launcher of this node, which reads it, ends then."""
        # The launcher that reads the outcome kills this process, so it is written last, even if closing hangs.
        closing = threading.Thread(target=self._close, name="close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if outcome is not None and (folder := os.environ.get(NODE_FOLDER_KEY)):
            brief = replace(outcome, reason=outcome.reason and outcome.reason[: _OUTCOME_BYTES // 8])
            _write(Path(folder) / _OUTCOME, msgspec.json.encode(brief))

    def _close(self) -> None:
        try:
            self._stack.close()
        except Exception:  # the run's outcome stays
            logger.exception("what the jobs of this node shared could not be closed")

    def _await_silence(self) -> None:
        while (left_s := self._heard_at + self._silence_s - time.monotonic()) > 0:
            time.sleep(left_s)
        logger.error("no message from the launcher for %.0f s: stopping this node's jobs", self._silence_s)
        os._exit(1)


def _seen_run(root: str, identity: RunIdentity) -> RunDir:
    """The directory of the run. Raises ConfigError if this node does not see what the launcher wrote there."""
    run_dir = RunDir(Path(root))
    found = read_identity(run_dir.identity_file) if run_dir.identity_file.exists() else None
    if found == identity:
        return run_dir
    raise ConfigError(
        "output_dir",
        f"{root} ({'nothing there' if found is None else f'run {found.run_id}'})",
        f"run {identity.run_id}, start {identity.incarnation}, which the launcher wrote there",
        "Put output_dir on a file system that all nodes share, under the same path.",
    )


def _make_files(folder: Path) -> None:
    """Make the files for messages, while the disk has room for them."""
    _write(folder / _OUTCOME, b"\n" * _OUTCOME_BYTES)
    if not (folder / _SIGNAL).exists():  # one that came while the run was being resumed stops it
        _write(folder / _SIGNAL, b"00")


def pass_signal(folder: Path, signum: int) -> bool:
    """Have the agent of this node tell node 0 of a signal. False if there is none that reads it."""
    is_read = (folder / _SIGNAL).exists()
    if is_read:
        _write(folder / _SIGNAL, b"%02d" % signum)
    return is_read


def read_outcome(folder: Path) -> Outcome | None:
    """How the run ended, once it has."""
    try:
        return msgspec.json.decode((folder / _OUTCOME).read_bytes(), type=Outcome)
    except (FileNotFoundError, msgspec.DecodeError):  # not yet
        return None


def _write(file: Path, data: bytes) -> None:
    """Over what is there: the disk may be full by now."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as out:
        out.write(data)
