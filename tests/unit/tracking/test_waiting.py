"""Notices about a side of a run that waits: after 50 steps, and the same only once."""

from __future__ import annotations

from pipelinerl.records import MetricRecord
from pipelinerl.tracking.collector import WAITING_STEPS, WaitingWatch


def step(number: int, wait_s: float) -> MetricRecord:
    values = {"finetune/step_s": 2.0, "finetune/wait_data_s": wait_s}
    return MetricRecord(source="finetune_0", step=number, time=2.0 * number, values=values)


def idle(time_s: float, *seconds: float) -> MetricRecord:
    values = {f"actor/server_idle_s_{index}": value for index, value in enumerate(seconds)}
    return MetricRecord(source="actor_0", step=0, time=time_s, values=values)


def said(watch: WaitingWatch, waits: list[float], first: int = 1) -> dict[int, str]:
    notices = {number: watch.step(step(number, wait_s)) for number, wait_s in enumerate(waits, first)}
    return {number: notice for number, notice in notices.items() if notice is not None}


def test_a_trainer_that_waits_is_said_once() -> None:
    watch = WaitingWatch("do something")
    notices = said(watch, [0.7] * (3 * WAITING_STEPS))
    assert [*notices] == [WAITING_STEPS]
    assert "35%" in notices[WAITING_STEPS] and notices[WAITING_STEPS].endswith("do something")


def test_less_is_not_said() -> None:
    assert not said(WaitingWatch(""), [0.5] * (3 * WAITING_STEPS))
    assert not said(WaitingWatch(""), [1.9] * (WAITING_STEPS - 1))


def test_servers_without_work() -> None:
    """Two servers, 10 s between records: 8 of 20 s idle."""
    watch = WaitingWatch("")
    for number in range(4):
        watch.actor(idle(10.0 * number, 5.0, 3.0))
    notices = said(watch, [0.0] * WAITING_STEPS)
    assert "40%" in notices[WAITING_STEPS] and "servers" in notices[WAITING_STEPS]
    assert not said(watch, [0.0] * WAITING_STEPS)  # nothing is known of these steps
