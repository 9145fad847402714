"""vLLM's packed NCCL transfer with our checks around it. The trainer's half is `weights.nccl_transport`."""

from __future__ import annotations

from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from pipelinerl.inference.reload import CheckedReload


class CheckedNCCLWeightTransferEngine(CheckedReload, NCCLWeightTransferEngine):
    """Receives as vLLM does; refuses incomplete updates and survives failed ones."""

    may_load_in_place = True

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one (of a trainer that is gone) first."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive all tensors and load them."""
        self.expect(update_info.names, update_info.shapes)
        super().receive_weights(update_info)
