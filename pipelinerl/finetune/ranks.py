"""The trainer's process group and device, and the few collectives that the trainer needs.

The launcher prepares the environment (RANK, WORLD_SIZE, LOCAL_RANK). Ranks of one machine meet through a file: the
first one listens at a port that the system picks and writes it there. A port chosen in advance could be taken
meanwhile, and a rank that connects to a port without a listener can even reach itself. Ranks of several machines meet
at MASTER_ADDR and MASTER_PORT, with Accelerate. A collective waits for the other ranks, at most `timeout_s`.

Collectives of this file use gloo, not NCCL: a rank that waits in NCCL keeps its GPU busy, which would stall a server
that shares it at every layer.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from pipelinerl.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_PORT_KEY = "port"
#: Of a fault that ranks tell each other.
_MAX_FAULT_BYTES = 500


class RankFault(RuntimeError):
    """A rank cannot continue, so none does. Raised on all ranks at the same place."""


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world_size` trainer processes, computing on `device`. One rank alone has no process group.

    `host_group` carries the collectives of this class; None: the default group does, on `device`.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in double precision."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: Sequence[float]) -> list[float]:
        """Element-wise minimum over all ranks."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def broadcast(self, value: int) -> int:
        """The first rank's `value` on every rank."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._carrier)
        dist.broadcast(tensor, src=0, group=self.host_group)
        return int(tensor.item())

    def first_fault(self, fault: str | None) -> str | None:
        """The `fault` of the first rank that has one, with its number unless all have one; None if none has. The same
        on all ranks, which must call it before a collective that one of them may be unable to join.
        """
        if self.world_size == 1:
            return fault
        first, is_everyones = self.min([self.world_size if fault is None else self.rank, float(fault is not None)])
        if first == self.world_size:
            return None
        text = (fault or "").encode()[:_MAX_FAULT_BYTES] if self.rank == first else b""
        # Sums of characters of one rank and zeros of the others.
        codes = self.sum([float(code) for code in text.ljust(_MAX_FAULT_BYTES, b"\0")])
        told = bytes(map(int, codes)).rstrip(b"\0").decode(errors="ignore")
        return told if is_everyones else f"rank {int(first)}: {told}"

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            self.sum([0.0])

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._carrier)
        dist.all_reduce(tensor, op=operation, group=self.host_group)
        return tensor.tolist()

    @property
    def _carrier(self) -> torch.device:
        """Device of tensors that are sent."""
        return self.device if self.host_group is None else torch.device("cpu")

    def close(self) -> None:
        """Leave the process group. A gloo group stays, until `main.end_process` ends the process with it."""
        if dist.is_initialized() and dist.get_backend() != "gloo":
            dist.destroy_process_group()


@contextmanager
def joined_ranks(
    environ: Mapping[str, str], device: str, timeout_s: float, rendezvous: Path | None = None
) -> Iterator[Ranks]:
    """`start_ranks`; the group is left after the block.

    Not if the block failed: leaving NCCL waits for the other ranks, which wait for this one. The process has to end
    (`main.end_process`), which the others notice.
    """
    ranks = start_ranks(environ, device, timeout_s, rendezvous)
    yield ranks
    ranks.close()


def start_ranks(environ: Mapping[str, str], device: str, timeout_s: float, rendezvous: Path | None = None) -> Ranks:
    """Join the process group that `environ` describes and pick this rank's device.

    Args:
        rendezvous: file where ranks of one machine meet, unique to this start. None: at MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: `cuda` was requested and this process sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "world.device", "cuda", "a GPU that PyTorch can use", "Check CUDA_VISIBLE_DEVICES, or set cpu."
        )
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        if device == "cuda":
            torch.cuda.set_device(0)
        return Ranks(0, 1, torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))

    timeout = timedelta(seconds=timeout_s)
    if rendezvous is None:
        state = PartialState(cpu=device == "cpu", timeout=timeout)
        return Ranks(state.process_index, state.num_processes, state.device, _host_group(timeout))
    rank = int(environ["RANK"])
    own_device = torch.device("cpu")
    if device == "cuda":
        # A process may see the GPUs of all ranks of the machine, or only its own.
        own_device = torch.device("cuda", int(environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(own_device)
    store = _open_store(rendezvous, rank, world_size, timeout)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(rank, world_size, own_device, _host_group(timeout))


def _host_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """A gloo group of all ranks next to the default group; None if that is gloo itself. All ranks call it."""
    if dist.get_backend() == "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    # Held until the process ends: freeing a gloo group can hang (see `main.end_process`).
    atexit.register(id, group)
    return group


def _open_store(file: Path, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store of the process group. Waits until the first rank listens; `file` is removed when all have read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    notice = FileStore(str(file), world_size)
    notice.set_timeout(timeout)
    if rank == 0:
        store = TCPStore(_LOOPBACK, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        notice.set(_PORT_KEY, str(store.port))
        return store
    port = int(notice.get(_PORT_KEY))
    return TCPStore(_LOOPBACK, port, world_size, is_master=False, timeout=timeout)


def ensure_process_group(ranks: Ranks) -> None:
    """Make a process group even for a single rank: sharding libraries need one."""
    if not dist.is_initialized():
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
