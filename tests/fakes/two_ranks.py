"""Two trainer ranks as threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelinerl.finetune.ranks import Ranks


class _Rank(Ranks):
    """One of the two, which meet at a barrier. The box holds what both gave."""

    def _reduce(self, values, operation):
        box, barrier = self.host_group
        box[self.rank] = list(values)
        barrier.wait(60)
        combine = {"SUM": sum, "MIN": min, "MAX": max}[operation.name]
        result = [combine(pair) for pair in zip(*box, strict=True)]
        barrier.wait(60)
        return result


def on_two_ranks(work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns on each of the ranks, which run at the same time."""
    meeting: Any = ([None, None], threading.Barrier(2))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, [_Rank(rank, 2, host_group=meeting) for rank in range(2)]))
