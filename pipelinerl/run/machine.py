"""How many CPU cores this machine lets us use: affinity and the container's quota. Read once by the launcher."""

from __future__ import annotations

import os
from pathlib import Path

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = CPU_QUOTA_FILE) -> int:
    """Cores of the affinity mask, or fewer if a cgroup quota (`<microseconds> <period>`) allows less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return cores
    return max(1, min(cores, -(-int(quota) // int(period))))
