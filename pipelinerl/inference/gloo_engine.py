"""Weight transfer over gloo for servers on CPUs: the server's half. The trainer's half is `weights.gloo_transport`.

The group is our own `ProcessGroupGloo` over a `TCPStore` (the trainer is rank 0 and serves the store); it shares
nothing with the groups that vLLM or the trainer use among themselves.
"""

from __future__ import annotations

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from pipelinerl.inference.reload import CheckedReload
from pipelinerl.inference.transfer_info import GroupInitInfo, PackedUpdateInfo
from pipelinerl.weights.gloo_group import GlooGroup
from pipelinerl.weights.receiving import receive_buffers


class GlooWeightTransferEngine(CheckedReload, WeightTransferEngine[GroupInitInfo, PackedUpdateInfo]):
    """Receives packed buffers by broadcast and loads them layer by layer."""

    init_info_cls = GroupInitInfo
    update_info_cls = PackedUpdateInfo
    _group: GlooGroup | None = None
    _chunk_bytes: int = 0

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one (of a trainer that is gone) first."""
        self.shutdown()
        self._chunk_bytes = init_info.chunk_bytes
        self._group = GlooGroup.join(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_of(self.parallel_config),
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Receive every buffer of the update. RuntimeError: the trainer went away or is too slow, or one is damaged."""
        group = self._group
        if group is None:
            raise RuntimeError("gloo weight transfer is not initialized; call /init_weight_transfer_engine first")
        layout = self.layout_of(update_info, self._chunk_bytes)

        def fetch(num_bytes: int) -> torch.Tensor:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            group.broadcast(buffer)
            return buffer

        receive_buffers("gloo", layout, update_info.pass_id, fetch, self.load_buffer)
        self.all_loaded()

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As the base class, without its wait for an accelerator: everything here is on the CPU and done."""
        self.receive_weights(self.parse_update_info(update_info))

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
