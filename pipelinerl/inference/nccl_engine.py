"""Packed NCCL transfer into a server on a GPU: the server's half. The trainer's half is `weights.nccl_transport`.

The group is PyTorch's own (see `weights.nccl_group`) and shares nothing with those that vLLM uses among its workers.
A buffer is loaded only after its broadcast has ended and its content was checked. While a buffer is checked and copied
into place by proven copies, the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from pipelinerl.inference.reload import CheckedReload
from pipelinerl.inference.transfer_info import GroupInitInfo, PackedUpdateInfo
from pipelinerl.weights.layout import BufferLayout, UpdateLayout
from pipelinerl.weights.nccl_group import NCCLGroup
from pipelinerl.weights.receiving import receive_buffers


class NCCLWeightTransferEngine(CheckedReload, WeightTransferEngine[GroupInitInfo, PackedUpdateInfo]):
    """Receives packed buffers by broadcast. Refuses incomplete updates and survives failed ones."""

    init_info_cls = GroupInitInfo
    update_info_cls = PackedUpdateInfo
    may_load_in_place = True
    _group: NCCLGroup | None = None
    _chunk_bytes: int = 0

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one (of a trainer that is gone) first.

        Raises:
            RuntimeError: the trainer did not come in time, or NCCL does not carry data here.
        """
        self.shutdown()
        self._chunk_bytes = init_info.chunk_bytes
        self._group = NCCLGroup.join(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_of(self.parallel_config),
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
            device=torch.device(self.device.type, torch.cuda.current_device()),
        )

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Receive every buffer and load it. RuntimeError: the trainer went away or is too slow, or one is damaged."""
        group = self._group
        if group is None:
            raise RuntimeError("nccl weight transfer is not initialized; call /init_weight_transfer_engine first")
        layout = self.layout_of(update_info, self._chunk_bytes)
        stream = torch.cuda.current_stream(self.device)

        rooms = self._two_rooms(layout)

        def fetch(num_bytes: int) -> torch.Tensor:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            group.broadcast(buffer)
            return buffer

        def load(part: BufferLayout, buffer: torch.Tensor) -> None:
            self.load_buffer(part, buffer)
            # The copies must have read the buffer before its memory is used again.
            stream.synchronize()

        if rooms is None:
            receive_buffers("nccl", layout, update_info.pass_id, fetch, load)
        else:
            ahead = _Ahead(group, rooms)
            receive_buffers("nccl", layout, update_info.pass_id, ahead.fetch, load, ahead.start)
        self.all_loaded()

    def _two_rooms(self, layout: UpdateLayout) -> list[torch.Tensor] | None:
        """Memory for every other buffer, and for those between. None: one buffer after the other.

        With a broadcast under way no memory should be taken from the device: that may wait for the broadcast, without a
        time-out. Loaders take some, and so do buffers that are made one by one.
        """
        if not self.only_copies or len(layout.buffers) < 2:
            return None
        sizes = [max(part.num_bytes for part in layout.buffers[first::2]) for first in (0, 1)]
        try:
            return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        except torch.OutOfMemoryError:
            return None

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Ahead:
    """Receives into two rooms in turn: one is on its way while the other is loaded."""

    def __init__(self, group: NCCLGroup, rooms: list[torch.Tensor]) -> None:
        self._group = group
        self._next, self._after = rooms
        self._started: tuple[torch.Tensor, Callable[[], None]] | None = None

    def start(self, num_bytes: int) -> None:
        buffer = self._next[:num_bytes]
        self._next, self._after = self._after, self._next
        self._started = (buffer, self._group.start(buffer))

    def fetch(self, num_bytes: int) -> torch.Tensor:
        if self._started is None:
            self.start(num_bytes)
        assert self._started is not None
        (buffer, wait), self._started = self._started, None
        wait()
        return buffer
