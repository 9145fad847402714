"""One timer for many deadlines: each future is given up at its own, and only if it is still wanted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipelinerl.actor.deadlines import Deadlines


def future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.timeout(60)
async def test_each_ends_at_its_own_deadline() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time
    began = now()
    never, late, early, done, forgotten = (future() for _ in range(5))
    deadlines.watch(1, never, 3600)
    deadlines.watch(2, late, 0.05)
    deadlines.watch(3, early, 0.0)
    deadlines.watch(4, done, 0.01)
    deadlines.watch(5, forgotten, 0.01)
    done.set_result("answer")
    deadlines.forget(5)
    assert await early is None
    # Not with the early one, unless that was itself so late: the machine may have stood still.
    assert not late.done() or now() >= began + 0.05
    assert await late is None and now() >= began + 0.05
    assert done.result() == "answer" and not never.done() and not forgotten.done()
    deadlines.close()


@pytest.mark.timeout(60)
async def test_a_nearer_deadline_that_comes_later_is_met() -> None:
    deadlines = Deadlines()
    far, near = future(), future()
    deadlines.watch(1, far, 3600)
    deadlines.watch(2, near, 0.01)
    assert await near is None and not far.done()
    deadlines.forget(2)
    deadlines.close()
