"""Makes our transfer engines known to vLLM. Idempotent: vLLM calls it in each of its processes.

Two ways lead here: the `vllm.general_plugins` entry point of an installed package, and the import of
`inference.worker_extension`, which also works when the package is only on `PYTHONPATH`.
"""

from __future__ import annotations

from pipelinerl.inference.arguments import ENGINE_NAMES

_ENGINES = {
    "gloo": ("pipelinerl.inference.gloo_engine", "GlooWeightTransferEngine"),
    "nccl": ("pipelinerl.inference.nccl_engine", "NCCLWeightTransferEngine"),
    "ipc": ("pipelinerl.inference.ipc_engine", "IPCWeightTransferEngine"),
}


def register() -> None:
    """Register the engines by name; their modules are imported when one is created."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, (module, class_name) in _ENGINES.items():
        name = ENGINE_NAMES[transport]
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, class_name)
