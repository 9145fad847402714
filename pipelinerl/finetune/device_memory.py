"""The largest memory of the trainer's GPU during a step, as a metric. Called by the loop of rank 0 after every step."""

from __future__ import annotations

import torch

_GIB = 2**30


def peak_memory(device: torch.device) -> dict[str, float]:
    """`finetune/gpu_memory_peak_gib` since the last call: memory that PyTorch held for tensors, and reserved for them.

    Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "finetune/gpu_memory_peak_gib": allocated / _GIB,
        "finetune/gpu_memory_reserved_peak_gib": reserved / _GIB,
    }
