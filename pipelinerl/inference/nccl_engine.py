"""Packed NCCL transfer into a server on a GPU, with our checks. The trainer's half is `weights.nccl_transport`.

vLLM's own receiver loads a buffer on the stream that it believes the broadcast ran on. Here the stream is explicit and
a buffer is loaded only after its broadcast has ended and its content was checked: nothing rests on which stream is
current in which library, or on a broadcast that ends without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from pipelinerl.inference.reload import CheckedReload
from pipelinerl.weights.packing import meta_from_wire
from pipelinerl.weights.receiving import receive_buffers


@dataclass
class CheckedNCCLUpdateInfo(NCCLWeightTransferUpdateInfo):
    """What the trainer is about to broadcast, in order."""

    pass_id: int


class CheckedNCCLWeightTransferEngine(CheckedReload, NCCLWeightTransferEngine):
    """Refuses incomplete updates and survives failed ones."""

    update_info_cls = CheckedNCCLUpdateInfo  # type: ignore[assignment]
    may_load_in_place = True

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one (of a trainer that is gone) first.

        Raises:
            RuntimeError: NCCL cannot be used here; vLLM's communicator would then skip every broadcast in silence.
        """
        self.shutdown()
        super().init_transfer_engine(init_info)
        if self.model_update_group is None or self.model_update_group.disabled:
            raise RuntimeError("nccl: the communicator is disabled on this server, so no weights could arrive")

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive all tensors, buffer by buffer, and load them. RuntimeError: a buffer is damaged."""
        if not isinstance(update_info, CheckedNCCLUpdateInfo):
            raise TypeError(f"nccl: got {type(update_info).__name__}, expected an update with a pass_id")
        group = self.model_update_group
        if group is None:
            raise RuntimeError("nccl: the transfer group is not open")
        self.expect(update_info.names, update_info.shapes)
        metas = meta_from_wire(update_info.names, update_info.dtype_names, update_info.shapes)
        # vLLM types its models as plain modules.
        model: Any = self.model
        stream = torch.cuda.current_stream(self.device)

        def fetch(num_bytes: int) -> torch.Tensor:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            group.broadcast(buffer, src=0, stream=stream)
            stream.synchronize()
            return buffer

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            model.load_weights(tensors)
            # The copies must have read the buffer before its memory is used again.
            stream.synchronize()

        receive_buffers("nccl", metas, self.packed_buffer_size_bytes, update_info.pass_id, fetch, load)
