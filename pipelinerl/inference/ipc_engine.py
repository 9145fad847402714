"""vLLM's CUDA-IPC transfer with our checks around it, for a trainer on the same GPU."""

from __future__ import annotations

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from pipelinerl.inference.reload import CheckedReload


class CheckedIPCWeightTransferEngine(CheckedReload, IPCWeightTransferEngine):
    """Receives as vLLM does; refuses incomplete updates and survives failed ones."""
