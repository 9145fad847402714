"""How the bytes of an update travel from the trainer to the workers of one server: the protocol and the choice.

A transport lives as long as its group: it is opened, used for many updates, and closed; after any failure it is
closed and a new one is made.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

TransportName = Literal["gloo", "nccl", "ipc"]


class Transport(Protocol):
    """The trainer's end of one server's group. All methods block and are called from threads of the publisher."""

    chunk_bytes: int

    def prepare(self, num_workers: int) -> dict[str, Any]:
        """Open the rendezvous; returns what `/init_weight_transfer_engine` needs to find it."""
        ...

    def join(self) -> None:
        """Wait until the group is complete."""
        ...

    def send(self, buffer: torch.Tensor) -> None:
        """Send one packed buffer (uint8); returns when it may be overwritten."""
        ...

    def close(self) -> None:
        """Leave the group. A `join` or `send` in another thread fails soon after. May be called twice."""
        ...


def create_transport(
    name: TransportName,
    address: str,
    port: int | None,
    timeout_s: float,
    chunk_bytes: int,
    device_index: int | None = None,
) -> Transport:
    """A transport of the given kind.

    Args:
        name: `gloo` for servers on CPUs, `nccl` for servers on other GPUs, `ipc` for a server on the trainer's device.
        address: address of this machine at which the workers reach the trainer.
        port: TCP port of the rendezvous; None lets the system choose.
        timeout_s: limit of one operation, where the transport can enforce it.
        chunk_bytes: size of the packed buffers.
        device_index: the GPU that `nccl` and `ipc` send from; None for the current one of the calling thread.
    """
    if name == "gloo":
        from pipelinerl.weights.gloo_transport import GlooTransport

        return GlooTransport(address, port, timeout_s, chunk_bytes)
    if name == "nccl":
        from pipelinerl.weights.nccl_transport import NCCLTransport

        return NCCLTransport(address, port, timeout_s, chunk_bytes, device_index)
    if name == "ipc":
        from pipelinerl.weights.ipc_transport import IPCTransport

        return IPCTransport(port, timeout_s, chunk_bytes, device_index)
    raise ValueError(f"transport: got {name!r}, expected 'gloo', 'nccl' or 'ipc'")
