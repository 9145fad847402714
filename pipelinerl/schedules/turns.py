"""What the trainer does around training and updating so that generation is out of the way. Called by its loop.

Every rank has the same object; rank 0's knows the actor and the servers, and the others follow its answer. With
`schedule=pipeline` there is none: weights go to the servers while they generate.

| schedule, placement        | before training a round                    | before an update                |
|----------------------------|--------------------------------------------|---------------------------------|
| concurrent, conventional   |                                            | running rollouts end            |
| conventional, colocated    | rollouts and evaluations end, servers sleep | optimizer state leaves the GPU |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipelinerl.schedules.drain import Drain

#: Rank 0's answer on every rank; they wait for rank 0.
Agree = Callable[[bool], bool]


class Turns(Protocol):
    """The two places at which the loop asks. False: the trainer was asked to stop meanwhile."""

    def before_training(self, steps_done: int) -> bool: ...

    def before_update(self, version: int) -> bool: ...


class DrainedUpdates:
    """Running rollouts end before new weights come; `drain` is None on ranks other than the first."""

    def __init__(self, drain: Drain | None, agree: Agree) -> None:
        self._drain = drain
        self._agree = agree

    def before_training(self, steps_done: int) -> bool:
        return True

    def before_update(self, version: int) -> bool:
        return self._agree(self._drain is None or self._drain.wait(version))


class SharedDevice:
    """Servers and trainer take turns on the same devices.

    Args:
        drain: None on ranks other than the first.
        next_update: the version that is sent next, given the steps that are done.
        free_devices: rank 0 puts the servers to sleep; the next update wakes them.
        take_state: gets what only training needs onto the device, after the servers left it.
        put_state_away: the opposite, before the servers come back.
        all_away: returns when every rank has put its state away.
    """

    def __init__(
        self,
        drain: Drain | None,
        agree: Agree,
        next_update: Callable[[int], int],
        free_devices: Callable[[], None],
        take_state: Callable[[], None] = lambda: None,
        put_state_away: Callable[[], None] = lambda: None,
        all_away: Callable[[], None] = lambda: None,
    ) -> None:
        self._drain = drain
        self._agree = agree
        self._next_update = next_update
        self._free_devices = free_devices
        self._take_state = take_state
        self._put_state_away = put_state_away
        self._all_away = all_away
        self._is_trainers_turn = False

    def before_training(self, steps_done: int) -> bool:
        if self._is_trainers_turn:
            return True
        if not self._agree(self._drain is None or self._drain.wait(self._next_update(steps_done))):
            return False
        if self._drain is not None:
            self._free_devices()
        # No rank allocates before the servers have left.
        self._agree(True)
        self._take_state()
        self._is_trainers_turn = True
        return True

    def before_update(self, version: int) -> bool:
        if self._is_trainers_turn:
            self._put_state_away()
            # Rank 0 wakes the servers of all GPUs, of those too whose rank takes longer.
            self._all_away()
            self._is_trainers_turn = False
        return True
