"""Weight transfer into a server that shares the trainer's device: the server's half of `weights.ipc_transport`.

vLLM's own CUDA IPC engine takes pickled handles over HTTP; here handles are plain data and come over a connection of
their own that needs a secret. A buffer is copied before it is acknowledged: loading layer by layer keeps tensors longer
than the trainer keeps the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo

from pipelinerl.inference.reload import CheckedReload
from pipelinerl.inference.transfer_info import PackedUpdateInfo
from pipelinerl.weights.handle_channel import HandleReceiver
from pipelinerl.weights.handles import copy_of_buffer
from pipelinerl.weights.receiving import receive_buffers


@dataclass
class IPCInitInfo(WeightTransferInitInfo):
    """Where the trainer offers handles, and the secret that a worker shows there."""

    port: int
    secret: str
    timeout_s: float
    chunk_bytes: int


class IPCWeightTransferEngine(CheckedReload, WeightTransferEngine[IPCInitInfo, PackedUpdateInfo]):
    """Copies offered buffers and loads them. Refuses incomplete updates and survives failed ones."""

    init_info_cls = IPCInitInfo
    update_info_cls = PackedUpdateInfo
    may_load_in_place = True
    _channel: HandleReceiver | None = None
    _chunk_bytes: int = 0

    def init_transfer_engine(self, init_info: IPCInitInfo) -> None:
        """Connect with the trainer, leaving an earlier one (that is gone) first."""
        self.shutdown()
        self._chunk_bytes = init_info.chunk_bytes
        self._channel = HandleReceiver(init_info.port, init_info.secret, init_info.timeout_s)

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Copy and load every buffer. RuntimeError: the trainer went away or is too slow, or a buffer is damaged."""
        channel = self._channel
        if channel is None:
            raise RuntimeError("ipc weight transfer is not initialized; call /init_weight_transfer_engine first")
        layout = self.layout_of(update_info, self._chunk_bytes)

        def fetch(num_bytes: int) -> torch.Tensor:
            handle = channel.take()
            try:
                buffer = copy_of_buffer(handle, self.device)
            except (RuntimeError, ValueError, KeyError) as error:
                channel.fail(f"{type(error).__name__}: {error}")
                raise
            channel.done()
            return buffer

        receive_buffers("ipc", layout, update_info.pass_id, fetch, self.load_buffer)
        self.all_loaded()

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As the base class; waits for the device only where there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
