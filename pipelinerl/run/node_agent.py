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
from pipelinerl.rundir.durable import replace_file
from pipelinerl.rundir.layout import RunDir, RunIdentity, read_identity
from pipelinerl.version import __version__
from pipelinerl.world import (
    Cluster,
    ClusterNode,
    WorldMap,
    can_bind,
    memory_of_machine,
    nvml_gpu_lister,
    nvml_gpu_memory,
    usable_cores,
)

logger = logging.getLogger(__name__)
#: The folder for messages between the agent and the launcher of this node, if that brought Ray up.
NODE_FOLDER_KEY = "PIPELINERL_NODE_FOLDER"
_BEGUN, _OUTCOME, _SIGNAL = "begun", "outcome.json", "signal"
# Those of a Ray worker are not for jobs: they would connect to it, or take its number of threads.
_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS")


class Facts(msgspec.Struct, frozen=True):
    """What an agent says of its node. `busy_ports` are those that were asked for and cannot be bound."""

    version: str
    machine: ClusterNode
    busy_ports: list[int]


class Order(msgspec.Struct, frozen=True):
    """What jobs are about to be started. `environ` is the launcher's, `folder` where it works, `python` its program."""

    run_dir: str
    identity: RunIdentity
    rank: int
    num_nodes: int
    token: str
    environ: dict[str, str]
    folder: str
    python: str


class Started(NamedTuple):
    """A process of a job, and its part of the job's logs."""

    pid: int
    stdout: LogPart
    stderr: LogPart


class Report(msgspec.Struct, frozen=True):
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
        silence_s: how long the launcher may say nothing.
    """

    def __init__(self, host: str, num_gpus: int, num_cpus: int, silence_s: float) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if num_gpus else ""
        cores = min(usable_cores(), num_cpus)
        machine = ClusterNode.from_env({"CUDA_VISIBLE_DEVICES": visible}, nvml_gpu_lister, cores, nvml_gpu_memory, host)
        self._machine = replace(machine, host_bytes=memory_of_machine())
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._children: dict[int, Child] = {}
        self._stack = ExitStack()
        self._node: LocalNode | None = None
        self._pythons = ("", "")
        threading.Thread(target=self._await_silence, name="silence", daemon=True).start()

    def describe(self, ports: list[int]) -> Facts:
        return Facts(__version__, self._machine, [port for port in ports if not can_bind(port)])

    def begin(self, order: Order) -> str | None:
        """Make ready to start jobs. Returns why this node cannot."""
        with suppress(OSError):  # relative paths mean what they mean at the launcher, where that folder is here
            os.chdir(order.folder)
        try:
            self._begin(order)
        except UserError as error:
            return str(error)
        return None

    def _begin(self, order: Order) -> None:
        run_dir = RunDir(Path(order.run_dir))
        found = read_identity(run_dir.identity_file) if run_dir.identity_file.exists() else None
        if found != order.identity:
            raise ConfigError(
                "output_dir",
                f"{run_dir.root} ({'nothing there' if found is None else f'run {found.run_id}'})",
                f"run {order.identity.run_id}, start {order.identity.incarnation}, which the launcher wrote there",
                "Put output_dir on a file system that all nodes share, under the same path.",
            )
        logging.basicConfig(
            level=logging.INFO, format=LOG_FORMAT, filename=run_dir.root / f"launch_node_{order.rank}.log", force=True
        )
        own = {key: value for key, value in os.environ.items() if not key.startswith(_RAYS_OWN)}
        # What was set on a node is meant for it; our own variables are those of the run.
        run = {key: value for key, value in order.environ.items() if key.startswith("PIPELINERL_")}
        environ = {**order.environ, **own, **run}
        config, world = load_config(run_dir.config_file), WorldMap.from_json(run_dir.world_file.read_bytes())
        check_node(Start(config, Cluster((self._machine,) * order.num_nodes), environ))
        if folder := os.environ.get(NODE_FOLDER_KEY):
            (Path(folder) / _BEGUN).touch()
        self._pythons = (order.python, sys.executable)
        jobs = [job for job in world.jobs if job.node_rank == order.rank]
        node = local_node(config, jobs, run_dir, environ, order.token, self._events)
        self._node = self._stack.enter_context(node)

    def start(self, command: Command) -> Started:
        """Start a job. Raises OSError if it cannot be started."""
        assert self._node is not None
        theirs, own = self._pythons
        if command.argv[0] == theirs:
            command = replace(command, argv=(own, *command.argv[1:]))
        child = self._node.start(command)
        self._children[child.pid] = child
        return Started(child.pid, child.stdout, child.stderr)

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
        return Report(exits, seen, read_signal())

    def end_rest(self, pid: int) -> None:
        if self._node is not None:
            self._node.end_rest(self._children[pid])

    def end_all(self, grace_s: float) -> list[int]:
        return self._node.end_all(grace_s) if self._node is not None else []

    def leave(self, outcome: Outcome | None) -> None:
        """No more jobs. `outcome` is the run's, if it is over."""
        folder = os.environ.get(NODE_FOLDER_KEY)
        if outcome is not None and folder:  # first: the launcher does not wait long
            write_outcome(Path(folder), outcome)
        self._stack.close()
        if outcome is not None and folder:
            (Path(folder) / _BEGUN).unlink(missing_ok=True)

    def _await_silence(self) -> None:
        while (left_s := self._heard_at + self._silence_s - time.monotonic()) > 0:
            time.sleep(left_s)
        logger.error("the launcher has said nothing for %.0f s: this node's jobs end", self._silence_s)
        os._exit(1)


def read_signal() -> int | None:
    """The signal that the launcher of this node got."""
    folder = os.environ.get(NODE_FOLDER_KEY)
    with suppress(OSError, ValueError):
        return int((Path(folder) / _SIGNAL).read_text(encoding="ascii")) if folder else None
    return None


def write_signal(folder: Path, signum: int) -> None:
    replace_file(folder / _SIGNAL, str(signum).encode())


def has_begun(folder: Path) -> bool:
    """Whether an agent of a run is here: somebody reads signals. It takes its leave with the run's outcome."""
    return (folder / _BEGUN).exists()


def write_outcome(folder: Path, outcome: Outcome) -> None:
    replace_file(folder / _OUTCOME, msgspec.json.encode(outcome))


def read_outcome(folder: Path) -> Outcome | None:
    """How the run ended, once it has."""
    try:
        return msgspec.json.decode((folder / _OUTCOME).read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None
