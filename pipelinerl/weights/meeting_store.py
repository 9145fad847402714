"""The store of a transfer group: the trainer serves it, the workers of the server find one another there."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipelinerl.weights.meeting_port import listen


def serve_store(address: str, port: int | None, world_size: int, timeout_s: float) -> tuple[TCPStore, int]:
    """A store for `world_size` ranks that listens at `address`, and its port (`port`, if that is free).

    By itself a `TCPStore` listens on every interface; a socket of our own listens on the one address that workers use.
    """
    listener = listen(address, port)
    found = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        found,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, found
