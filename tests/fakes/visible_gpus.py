"""GPUs by their number among those that this process sees."""

from __future__ import annotations

import os


def visible_gpu(number: int) -> str:
    """What `CUDA_VISIBLE_DEVICES` of a child has to be for its only GPU to be our `cuda:<number>`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)
