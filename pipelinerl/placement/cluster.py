"""What there is: nodes, GPUs and cores, read from a mapping like `os.environ`. Called by the launcher; no I/O here.

The GPUs of this node are those of `CUDA_VISIBLE_DEVICES` if it is set (indices, UUIDs or MIG ids, in its order), else
those that `gpu_lister` finds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.placement.slurm import NODE_HOSTS_KEY, with_slurm_step

LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
GpuLister = Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, all alike. `gpus` and `cores` are those of one node; `hosts[rank]` is a node's address."""

    world_size: int
    rank: int
    master_addr: str
    master_port: int | None
    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    cores: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str], gpu_lister: GpuLister, cores: int = 1) -> Cluster:
        """Read WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT and CUDA_VISIBLE_DEVICES, or the first three from SLURM.

        Args:
            environ: the environment of the launcher.
            gpu_lister: returns the UUIDs of this node's GPUs in the order of their indices; called only if needed.
            cores: CPU cores that this node may use.

        Raises:
            ConfigError: a variable is not usable; the message names it.
        """
        environ = with_slurm_step(environ)
        world_size = _integer(environ, "WORLD_SIZE", 1, lowest=1)
        rank = _integer(environ, "RANK", 0, lowest=0)
        if rank >= world_size:
            raise ConfigError("RANK", rank, f"0 to {world_size - 1} (WORLD_SIZE={world_size})", "Set RANK per node.")
        master_port = _integer(environ, "MASTER_PORT", 0, lowest=0) or None
        hosts = _hosts(environ, world_size)
        return cls(
            world_size=world_size,
            rank=rank,
            master_addr=hosts[0],
            master_port=master_port,
            hosts=hosts,
            gpus=visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), gpu_lister),
            cores=max(1, cores),
        )


def visible_gpus(visible: str | None, gpu_lister: GpuLister) -> tuple[str, ...]:
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


def nvml_gpu_lister() -> list[str]:
    """UUIDs of this machine's NVIDIA GPUs by index, through NVML; none if there is no driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


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
