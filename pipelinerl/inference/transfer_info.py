"""What the trainer sends to the transfer engines of a server: how to join a group, and what is about to come."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.parallel import ParallelConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """How a worker joins the trainer's group; the body of `/init_weight_transfer_engine`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    chunk_bytes: int

    def rank_of(self, parallel: ParallelConfig) -> int:
        """The rank of this worker in the group."""
        return self.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank


@dataclass
class PackedUpdateInfo(WeightTransferUpdateInfo):
    """What the trainer is about to send, in order, and the number of its pass over the weights."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    pass_id: int
