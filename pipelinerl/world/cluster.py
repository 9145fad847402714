"""What a run can use: nodes, GPUs, cores, memory and free ports. Nodes and GPUs come from a mapping like `os.environ`.

The GPUs of this node are those of `CUDA_VISIBLE_DEVICES` if it is set (indices, UUIDs or MIG ids, in its order), else
all that NVML finds.

A port is free if it can be bound now and no other launcher has reserved it. The reservation is an abstract Unix socket
that the launcher holds for its lifetime: servers bind their ports only half a minute after the plan is made. It is
scoped to a network namespace, as ports are, and leaves no file.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import psutil

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import WorldConfig
from pipelinerl.errors import ConfigError

T = TypeVar("T", int, float)
LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
_OWN_RANK = "set WORLD_SIZE, RANK and MASTER_ADDR yourself, or WORLD_SIZE=1 for a run on each node"

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: Name of a reservation, before the number of the port.
RESERVED = "\0pipelinerl-port-"
_SCAN = 200
_PORT_KEYS = ("actor_group_port", "environment_start_port", "llm_start_port")


@dataclass(frozen=True)
class ClusterMember:
    """The place of this machine among those on which the same command was started. `master_addr` is the name or address
    of node 0, `master_port` the port where trainer ranks meet, if the user chose it."""

    world_size: int = 1
    rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str], cluster: Literal["auto", "ray"] = "auto") -> ClusterMember:
        """Read WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT, or the first two from SLURM.

        `cluster` is `world.cluster`. On an existing Ray cluster there is only one launcher, even under
        `ray symmetric-run`.

        Raises:
            ConfigError: a variable is not usable; the message names it.
        """
        alone = {"WORLD_SIZE": "1", "RANK": "0"} if cluster == "ray" else {}
        given, environ = environ, _with_slurm_step({**environ, **alone})
        world_size = _integer(environ, "WORLD_SIZE", 1, lowest=1)
        rank = _integer(environ, "RANK", 0, lowest=0)
        if rank >= world_size:
            raise ConfigError("RANK", rank, f"0 to {world_size - 1} (WORLD_SIZE={world_size})", "Set RANK per node.")
        master = environ.get("MASTER_ADDR", "").strip().strip("[]") if world_size > 1 else LOOPBACK
        if not master:
            expected = f"the name or address of node 0 (WORLD_SIZE={world_size})"
            raise ConfigError("MASTER_ADDR", None, expected, f"Export it on all nodes.{slurm_hint(given)}")
        return cls(world_size, rank, master, _integer(environ, "MASTER_PORT", 0, lowest=0) or None)


@dataclass(frozen=True)
class ClusterNode:
    """One node of a run. `gpus` are device ids as `CUDA_VISIBLE_DEVICES` writes them there; `gpu_bytes` is the memory
    of its smallest GPU and `host_bytes` that of the machine, if they are known."""

    host: str
    gpus: tuple[str, ...]
    cores: int
    gpu_bytes: int | None = None
    host_bytes: float | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str], cores: int | None = None, host: str = LOOPBACK) -> ClusterNode:
        """This machine, with the GPUs that `environ` shows. `cores`: None: all that this process may use; `host`: the
        address at which others reach it.

        Raises:
            ConfigError: CUDA_VISIBLE_DEVICES is not usable.
        """
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        gpus = tuple(map(str, range(len(nvml_cards())))) if visible is None else _visible_gpus(visible)
        memory = min((card.memory_bytes for card in cards_of(gpus)), default=0)
        return cls(host, gpus, max(1, usable_cores() if cores is None else cores), memory or None)


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, by rank. `rank` is the node of the launcher (-1: none of them), `master_port` where trainer
    ranks meet, if the user chose it."""

    nodes: tuple[ClusterNode, ...]
    rank: int = 0
    master_port: int | None = None

    @classmethod
    def alike(cls, machine: ClusterNode, member: ClusterMember) -> Cluster:
        """A cluster of nodes like this one, before the others have joined."""
        if member.world_size == 1:
            return cls((machine,), 0, member.master_port)
        machines = (replace(machine, host=f"node-{rank}") for rank in range(member.world_size))
        return cls(tuple(machines), member.rank, member.master_port)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(machine.host for machine in self.nodes)

    @property
    def num_gpus(self) -> int:
        return sum(len(machine.gpus) for machine in self.nodes)

    @property
    def most_gpus(self) -> int:
        """GPUs of the node that has most of them."""
        return max(len(machine.gpus) for machine in self.nodes)

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU; None if one is not known."""
        return _least([machine.gpu_bytes for machine in self.nodes if machine.gpus])

    def host_bytes(self, ranks: Collection[int]) -> float | None:
        """Memory of the smallest of these machines; None if one is not known."""
        return _least([self.nodes[rank].host_bytes for rank in ranks])

    @property
    def cores(self) -> int:
        """CPU cores of the smallest node with GPUs, or of the smallest one."""
        return min(machine.cores for machine in self.nodes if machine.gpus or not self.num_gpus)

    def describe(self) -> str:
        """`2 node(s) x 8 GPU(s)`, or the GPUs of each if they differ."""
        counts = [len(machine.gpus) for machine in self.nodes]
        if len(set(counts)) == 1:
            return f"{self.world_size} node(s) x {counts[0]} GPU(s)"
        return f"{self.world_size} nodes with {', '.join(map(str, counts))} GPUs"


def _least(sizes: Sequence[T | None]) -> T | None:
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None


def described_cluster(world: WorldConfig, machine: ClusterNode, member: ClusterMember) -> Cluster:
    """The cluster before its nodes have joined: that of `world.nodes`, else all nodes like this machine.

    Raises:
        ConfigError: the size of the Ray cluster is unknown.
    """
    if world.nodes is None:
        if world.cluster == "ray":
            expected = "the nodes, as [{gpus: 8}, {gpus: 4}], for a plan without the Ray cluster"
            raise ConfigError("world.nodes", None, expected, "Describe them.")
        return Cluster.alike(machine, member)
    nodes = [
        ClusterNode(f"node-{rank}", tuple(map(str, range(node.gpus))), node.cores or machine.cores, machine.gpu_bytes)
        for rank, node in enumerate(world.nodes)
    ]
    if len(nodes) == 1:
        nodes = [replace(nodes[0], host=LOOPBACK)]
    return Cluster(tuple(nodes), 0, member.master_port)


def _visible_gpus(visible: str) -> tuple[str, ...]:
    """Device ids of CUDA_VISIBLE_DEVICES. As CUDA does, the list ends at the first `-1`; unlike CUDA, a typing error is
    refused."""
    ids: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in ("", "-1", "NoDevFiles", "none", "void"):
            break
        fault = None
        if not re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/\-]+", entry):
            fault = "indices, GPU-... or MIG-... ids separated by commas", f"Correct the entry {entry!r}, or unset it."
        elif entry in ids:
            fault = "each device once", f"Remove the second {entry!r} from the list."
        if fault is not None:
            raise ConfigError("CUDA_VISIBLE_DEVICES", visible, *fault)
        ids.append(entry)
    return tuple(ids)


class Card(NamedTuple):
    """A GPU of this machine."""

    uuid: str
    name: str
    memory_bytes: int


def nvml_cards() -> list[Card]:
    """This machine's NVIDIA GPUs by index, through NVML; none if there is no driver.

    What NVML does not report (such as the memory of a card divided by MIG) is empty or zero.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []

    def answer(ask: Callable[[Any], Any], of: Any, otherwise: Any = None) -> Any:
        try:
            return ask(of)
        except pynvml.NVMLError:
            return otherwise

    try:
        handles = [answer(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            Card(
                str(answer(pynvml.nvmlDeviceGetUUID, handle, "")),
                str(answer(pynvml.nvmlDeviceGetName, handle, "GPU")),
                int(answer(lambda each: pynvml.nvmlDeviceGetMemoryInfo(each).total, handle, 0)),
            )
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def cards_of(gpus: Sequence[str]) -> list[Card]:
    """The cards of these GPUs, by index or (prefix of a) UUID; one that is not found, such as a MIG slice, has no name
    and no memory."""
    cards, unknown = nvml_cards(), Card("", "GPU", 0)
    return [
        next((card for index, card in enumerate(cards) if gpu == str(index) or card.uuid.startswith(gpu)), unknown)
        for gpu in gpus
    ]


def usable_cores(quota_file: Path = CPU_QUOTA_FILE) -> int:
    """CPU cores that this process may use: those of its affinity mask, or fewer if the container's quota
    (`<microseconds> <period>`) allows less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return cores
    return max(1, min(cores, -(-int(quota) // int(period))))


def memory_of_machine() -> float:
    """Bytes of this machine's memory that the process may use: the container's limit, if that is lower."""
    found = float(psutil.virtual_memory().total)
    for file in _MEMORY_LIMIT_FILES:
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            found = min(found, float(text))
    return found


def url_of(host: str, port: int) -> str:
    """`http://host:port`, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _integer(environ: Mapping[str, str], key: str, default: int, lowest: int) -> int:
    text = environ.get(key, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < lowest:
        raise ConfigError(key, text, f"an integer of at least {lowest}", f"Correct or unset the variable {key}.")
    return int(text)


def _with_slurm_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ`, with WORLD_SIZE and RANK if this is one task of each node of a SLURM step. With either of them set
    already, nothing is added.

    Raises:
        ConfigError: the step has several nodes and not one task on each, or a variable is missing.
    """
    if not is_slurm_step(environ):
        return environ
    nodes = int(environ["SLURM_STEP_NUM_NODES"])
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks != str(nodes):
        raise ConfigError(
            "SLURM_STEP_NUM_TASKS",
            tasks or None,
            f"{nodes}, one task for each node: the launcher starts the processes of its node itself",
            f"Start it by `srun --ntasks-per-node=1`, or {_OWN_RANK}.",
        )
    rank = environ.get("SLURM_NODEID", "").strip()
    if not rank:  # else every node would be the first one
        expected = f"the number of this node in the step, 0 to {nodes - 1}"
        raise ConfigError("SLURM_NODEID", None, expected, f"Pass SLURM's variables on, or {_OWN_RANK}.")
    return {**environ, "WORLD_SIZE": str(nodes), "RANK": rank}


def slurm_hint(environ: Mapping[str, str]) -> str:
    """A hint for users whose script may not have meant one run over all nodes; may be empty."""
    if not is_slurm_step(environ):
        return ""
    return " `srun` started several nodes: see scripts/slurm.sbatch, or set WORLD_SIZE=1 for a run on each."


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this on several nodes, and no variable says otherwise.

    A step of a job has variables that neither the script of `sbatch` nor the shell of `salloc` has (`SLURM_STEP_*`),
    though both see the whole allocation in theirs (`SLURM_JOB_*`). So only a step over several nodes is a start on
    several nodes. Read here rather than in a script, because a container has `srun`'s environment but not `scontrol`. A
    terminal (`srun --pty`) is one task's alone, so what is typed there starts on one node.
    """
    if any(environ.get(key, "").strip() for key in ("WORLD_SIZE", "RANK")) or "SLURM_PTY_PORT" in environ:
        return False
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    return nodes.isdecimal() and int(nodes) > 1


def can_bind(port: int) -> bool:
    """Whether the port of this machine is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def scanned_ports(config: RunConfig, master_port: int) -> list[int]:
    """Ports that a plan may use. Other nodes report which of these they cannot bind."""
    starts = [master_port, *(getattr(config.world, key) for key in _PORT_KEYS)]
    return sorted({port for start in starts for port in range(start, min(start + _SCAN, 65536))})


class FreePorts:
    """Hands out TCP ports, each once per node. A context manager that releases its reservations on exit.

    Args:
        config: of the run; a port that differs from its default was chosen by the user.
        rank: of this node. Ports of other nodes cannot be probed.
        busy_elsewhere: ports that other nodes cannot bind, by rank.
        reserve: whether to keep other launchers from using the same ports; not in a dry run.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int = 0,
        busy_elsewhere: Mapping[int, Collection[int]] | None = None,
        reserve: bool = True,
    ) -> None:
        defaults = WorldConfig.model_fields
        self._chosen = {f"world.{key}" for key in _PORT_KEYS if getattr(config.world, key) != defaults[key].default}
        self._rank = rank
        self._busy_elsewhere = busy_elsewhere or {}
        self._reserves = reserve
        self._taken: set[tuple[int, int]] = set()
        self._reserved: list[socket.socket] = []

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        """A free port of that node: `preferred`, or another one. `key` is where the user sets it.

        Raises:
            ConfigError: the port was set by the user and is taken, or none of 200 is free.
        """
        last = min(preferred + _SCAN, 65536)
        for port in range(preferred, last):
            if (node_rank, port) in self._taken:
                continue
            if self._is_free(node_rank, port):
                self._taken.add((node_rank, port))
                return port
            if key in self._chosen:
                raise ConfigError(
                    key,
                    port,
                    "a free port of this machine; it is in use",
                    f"Choose another {key}, or leave it out to get a free port.",
                )
        raise ConfigError(key, preferred, f"a free port from {preferred} to {last - 1}", "Choose another start port.")

    def __enter__(self) -> FreePorts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._reserved:
            self._reserved.pop().close()

    def _is_free(self, node_rank: int, port: int) -> bool:
        if node_rank != self._rank:
            return port not in self._busy_elsewhere.get(node_rank, ())
        return can_bind(port) and (not self._reserves or self._reserve(port))

    def _reserve(self, port: int) -> bool:
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            reservation.bind(f"{RESERVED}{port}")
        except OSError:
            reservation.close()
            return False
        self._reserved.append(reservation)
        return True
