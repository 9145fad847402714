"""What there is: nodes, GPUs and cores, read from a mapping like `os.environ`, under SLURM from its variables.

The GPUs of this node are those of `CUDA_VISIBLE_DEVICES` if it is set (indices, UUIDs or MIG ids, in its order), else
those that `gpu_lister` finds.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl.errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
NODE_HOSTS_KEY = "PIPELINERL_NODE_HOSTS"
_HOSTS = "SLURM_STEP_NODELIST"
_OWN_RANK = "set WORLD_SIZE, RANK and PIPELINERL_NODE_HOSTS yourself, or WORLD_SIZE=1 for a run on each node"
# Commas and plain characters outside of brackets, and what is in brackets.
_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
GpuLister = Callable[[], Sequence[str]]
GpuMemory = Callable[[Sequence[str]], int | None]


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, all alike. `gpus` and `cores` are those of one node; `hosts[rank]` is a node's address;
    `gpu_bytes` is the memory of its smallest GPU, if that is known."""

    world_size: int
    rank: int
    master_addr: str
    master_port: int | None
    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    cores: int
    gpu_bytes: int | None = None

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str],
        gpu_lister: GpuLister,
        cores: int = 1,
        gpu_memory: GpuMemory = lambda gpus: None,
    ) -> Cluster:
        """Read WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT and CUDA_VISIBLE_DEVICES, or the first three from SLURM.

        Args:
            environ: the environment of the launcher.
            gpu_lister: returns the UUIDs of this node's GPUs in the order of their indices; called only if needed.
            cores: CPU cores that this node may use.
            gpu_memory: returns the memory of the smallest of some GPUs, given their ids; None: not known.

        Raises:
            ConfigError: a variable is not usable; the message names it.
        """
        environ = _with_slurm_step(environ)
        world_size = _integer(environ, "WORLD_SIZE", 1, lowest=1)
        rank = _integer(environ, "RANK", 0, lowest=0)
        if rank >= world_size:
            raise ConfigError("RANK", rank, f"0 to {world_size - 1} (WORLD_SIZE={world_size})", "Set RANK per node.")
        master_port = _integer(environ, "MASTER_PORT", 0, lowest=0) or None
        hosts = _hosts(environ, world_size)
        gpus = _visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), gpu_lister)
        return cls(
            world_size=world_size,
            rank=rank,
            master_addr=hosts[0],
            master_port=master_port,
            hosts=hosts,
            gpus=gpus,
            cores=max(1, cores),
            gpu_bytes=gpu_memory(gpus) if gpus else None,
        )


def _visible_gpus(visible: str | None, gpu_lister: GpuLister) -> tuple[str, ...]:
    """Device ids of this node. As CUDA does, the list ends at the first `-1`; unlike CUDA, a typing error is refused.

    Without `CUDA_VISIBLE_DEVICES` the ids are the indices "0".."n-1" of the listed GPUs.
    """
    if visible is None:
        return tuple(str(index) for index in range(len(gpu_lister())))
    ids: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in ("", "-1", "NoDevFiles", "none", "void"):
            break
        if not re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/\-]+", entry):
            raise ConfigError(
                "CUDA_VISIBLE_DEVICES",
                visible,
                "indices, GPU-... or MIG-... ids separated by commas",
                f"Correct the entry {entry!r} or unset the variable.",
            )
        if entry in ids:
            raise ConfigError(
                "CUDA_VISIBLE_DEVICES", visible, "each device once", f"Remove the second {entry!r} from the list."
            )
        ids.append(entry)
    return tuple(ids)


class Card(NamedTuple):
    """A GPU of this machine."""

    uuid: str
    name: str
    memory_bytes: int


def nvml_cards() -> list[Card]:
    """This machine's NVIDIA GPUs by index, through NVML; none if there is no driver.

    What NVML does not tell of a card (the memory of one that is divided by MIG, for instance) is empty or zero.
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


def nvml_gpu_lister() -> list[str]:
    """UUIDs of this machine's NVIDIA GPUs by index."""
    return [card.uuid for card in nvml_cards()]


def nvml_gpu_memory(gpus: Sequence[str]) -> int | None:
    """Bytes of memory of the smallest of these GPUs (indices or UUIDs); None if one is unknown (MIG)."""
    cards = nvml_cards()
    sizes = [
        next(
            (card.memory_bytes for index, card in enumerate(cards) if gpu == str(index) or card.uuid.startswith(gpu)), 0
        )
        for gpu in gpus
    ]
    return min(sizes, default=0) or None


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


def url_of(host: str, port: int) -> str:
    """`http://host:port`, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _hosts(environ: Mapping[str, str], world_size: int) -> tuple[str, ...]:
    """Addresses of the nodes: loopback for one node, else PIPELINERL_NODE_HOSTS, else `name-0` counted up."""
    if world_size == 1:
        return (LOOPBACK,)
    listed = [host.strip().strip("[]") for host in environ.get(NODE_HOSTS_KEY, "").split(",") if host.strip()]
    if listed:
        if len(listed) != world_size:
            raise ConfigError(NODE_HOSTS_KEY, ",".join(listed), f"{world_size} hosts (WORLD_SIZE)", "List every node.")
        return tuple(listed)
    master = environ.get("MASTER_ADDR", "").strip().strip("[]")
    first, dot, domain = master.partition(".")
    numbered = re.fullmatch(r"(.*[A-Za-z][^.]*-)0", first)
    if numbered:
        return tuple(f"{numbered.group(1)}{rank}{dot}{domain}" for rank in range(world_size))
    raise ConfigError(
        "MASTER_ADDR",
        master or None,
        f"the address of node 0 as `NAME-0`, because WORLD_SIZE={world_size} needs the addresses of all nodes",
        f"Set {NODE_HOSTS_KEY} to the {world_size} addresses, separated by commas, in the order of RANK.",
    )


def _integer(environ: Mapping[str, str], key: str, default: int, lowest: int) -> int:
    text = environ.get(key, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < lowest:
        raise ConfigError(key, text, f"an integer of at least {lowest}", f"Correct or unset the variable {key}.")
    return int(text)


def _with_slurm_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ`, with WORLD_SIZE, RANK and the nodes' addresses if this is one task of each node of a SLURM step.

    What is set already stays: with WORLD_SIZE or RANK nothing is added, PIPELINERL_NODE_HOSTS replaces SLURM's names.

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
    hosts = environ.get(NODE_HOSTS_KEY, "").strip() or ",".join(hosts_of(environ.get(_HOSTS, "")))
    rank = environ.get("SLURM_NODEID", "").strip()
    if not rank:  # no node may take itself for the first one
        expected = f"the number of this node in the step, 0 to {nodes - 1}"
        raise ConfigError("SLURM_NODEID", None, expected, f"Pass SLURM's variables on, or {_OWN_RANK}.")
    return {**environ, "WORLD_SIZE": str(nodes), "RANK": rank, NODE_HOSTS_KEY: hosts}


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this on several nodes, and nobody said otherwise.

    A step of a job has variables that neither the script of `sbatch` nor the shell of `salloc` has (`SLURM_STEP_*`),
    though both see the whole allocation in theirs (`SLURM_JOB_*`). So only a step over several nodes is a start on
    several nodes. Read here rather than in a script, because a container has `srun`'s environment but not `scontrol`. A
    terminal (`srun --pty`) is one task's alone, so what is typed there starts on one node.
    """
    if any(environ.get(key, "").strip() for key in ("WORLD_SIZE", "RANK")) or "SLURM_PTY_PORT" in environ:
        return False
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    return nodes.isdecimal() and int(nodes) > 1


def hosts_of(hostlist: str) -> list[str]:
    """The names in SLURM's notation, in its order: `gpu[08-10,12],login-1` has five. Zeros in front stay.

    The notation is that of `scontrol show hostnames`: commas separate names; brackets hold numbers and ranges, in one
    name several times if need be (the last one counts fastest).

    Raises:
        ConfigError: it is something else.
    """
    entries = _ENTRY.findall(hostlist)
    if not entries or ",".join(entries) != hostlist:
        raise _unreadable(hostlist)
    return [host for entry in entries for host in _names(entry, hostlist)]


def _names(entry: str, hostlist: str) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", entry)  # plain, bracket, plain, ...
    choices = [_numbers(part, hostlist) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(bracket: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _unreadable(hostlist)
        first, last = found.group(1), found.group(2) or found.group(1)
        if int(last) < int(first):
            raise _unreadable(hostlist)
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(hostlist: str) -> ConfigError:
    next_step = f"Correct it, or {_OWN_RANK}."
    return ConfigError(_HOSTS, hostlist or None, "names of nodes as `gpu[01-04],login-1`", next_step)
