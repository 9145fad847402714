"""Replays a run: every recorded batch is rebuilt, trained on, and compared with what was recorded.

Called by the command `replay`. Waits for nothing but the processor.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipelinerl.replay.batches import BatchReplay
from pipelinerl.replay.recorded import last_step, recorded_batches, recorded_groups, recorded_numbers
from pipelinerl.run.open_run import StartedRun, open_streams


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """`first_difference` names the step and what differs; None if everything is equal."""

    steps: int
    checked_states: list[int]
    first_difference: str | None


def replay_run(
    run: StartedRun, max_steps: int | None = None, on_step: Callable[[int, dict[str, float]], None] | None = None
) -> ReplayReport:
    """Replay up to step `max_steps` (None: all) and stop at the first difference.

    Args:
        on_step: hears of every step and its numbers.

    Raises:
        ConfigError: the run cannot be replayed.
        StreamError: a stream cannot be read.
    """
    # late: this loads torch
    from pipelinerl.replay.training import TrainingReplay

    trainer = TrainingReplay(run)
    checked: list[int] = []
    step = 0
    with open_streams(run) as streams:
        end = last_step(streams) if max_steps is None else min(max_steps, last_step(streams))
        numbers = recorded_numbers(streams)
        rebuild = BatchReplay(run.config.finetune, recorded_groups(streams))
        for batch in recorded_batches(streams):
            if batch.step > end:
                break
            found = rebuild.difference(batch)
            if found is not None:
                return _report(batch.step, checked, f"batch of step {batch.step}: {found}")
            values = trainer.step(batch)
            step = batch.step
            if on_step is not None:
                on_step(step, values)
            found = trainer.number_difference(values, numbers.get(step, {}))
            if found is None and trainer.has_state(step):
                checked.append(step)
                found = trainer.state_difference(step)
            if found is not None:
                return _report(step, checked, f"step {step}: {found}")
    return _report(step, checked, None)


def _report(steps: int, checked: list[int], difference: str | None) -> ReplayReport:
    return ReplayReport(steps=steps, checked_states=checked, first_difference=difference)
