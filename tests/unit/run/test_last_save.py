"""How long the launcher of a node waits behind a signal: for its own trainers, and for those of the other nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pipelinerl.run.last_save import NO_OTHERS, LastSave, OtherLaunchers, let_trainers_save
from pipelinerl.run.processes import Child, ChildExited, Event, Interrupted, NodeEnded, NodeSaved

GRACE_S = 60.0
STOP = NodeEnded("interrupted", "node 1: stopped by SIGTERM", 143)


@dataclass
class Trainer:
    """Stands in for a child process: counts what it is asked."""

    name: str = "finetune_0"
    asked: list[str] = field(default_factory=list)

    @property
    def stderr(self) -> Any:
        return self

    @property
    def file(self) -> str:
        return f"{self.name}/stderr.log"

    def terminate(self) -> None:
        self.asked.append("terminate")

    def dump_stacks(self) -> None:
        self.asked.append("dump_stacks")


@dataclass
class Wait:
    """A wait whose events come one second after the other; after the last one, nothing comes any more."""

    events: list[Event]
    trainers: list[Trainer] = field(default_factory=lambda: [Trainer()])
    awaited: frozenset[int] = frozenset()
    is_signalled: bool = True
    now: float = 100.0
    saved_at: list[float] = field(default_factory=list)

    def next_event(self, timeout_s: float) -> Event | None:
        if not self.events:
            self.now += timeout_s
            return None
        self.now += 1.0
        return self.events.pop(0)

    def run(self) -> LastSave:
        others = OtherLaunchers(self.awaited, hear_saved=lambda: self.saved_at.append(self.now - 100.0))
        trainers = {trainer.name: cast(Child, trainer) for trainer in self.trainers}
        return let_trainers_save(trainers, others, self.next_event, GRACE_S, lambda: self.now, self.is_signalled)


def test_one_node_waits_for_its_trainers_and_no_longer() -> None:
    wait = Wait([ChildExited("actor_0", 1), ChildExited("finetune_0", 143)])
    assert wait.run() == LastSave(False, 58.0)
    assert wait.trainers[0].asked == ["terminate"]
    assert let_trainers_save({}, NO_OTHERS, wait.next_event, GRACE_S, lambda: 0.0, True) == LastSave(False, GRACE_S)


def test_a_trainer_that_does_not_end_says_where_it_is_when_the_time_is_over() -> None:
    wait = Wait([])
    assert wait.run() == LastSave(False, 0.0)
    assert wait.trainers[0].asked == ["terminate", "dump_stacks"]


def test_a_second_signal_does_not_wait() -> None:
    assert Wait([Interrupted(15)]).run() == LastSave(True, 0.0)


def test_the_own_signal_behind_that_of_another_node_is_not_a_second_one() -> None:
    """A scheduler signals all nodes; the word of another launcher may be faster."""
    events: list[Event] = [Interrupted(15), ChildExited("finetune_0", 143)]
    assert Wait(events, is_signalled=False).run() == LastSave(False, 58.0)
    assert Wait([Interrupted(15), Interrupted(15)], is_signalled=False).run().is_cut_short


@pytest.mark.parametrize("own_first", [True, False])
def test_servers_live_until_the_trainers_of_all_nodes_are_gone(own_first: bool) -> None:
    own = ChildExited("finetune_0", 143)
    events: list[Event] = [own, NodeSaved(1), STOP, NodeSaved(2)] if own_first else [NodeSaved(2), NodeSaved(1), own]
    wait = Wait(events, awaited=frozenset({1, 2}))
    assert wait.run().left_s == (56.0 if own_first else 57.0)
    assert wait.saved_at == ([1.0] if own_first else [3.0])


def test_a_node_without_trainers_says_so_at_once_and_waits_for_the_others() -> None:
    wait = Wait([STOP, NodeSaved(0)], trainers=[], awaited=frozenset({0}))
    assert wait.run() == LastSave(False, 58.0)
    assert wait.saved_at == [0.0]


def test_other_nodes_that_say_nothing_are_waited_for_until_the_time_is_over() -> None:
    wait = Wait([ChildExited("finetune_0", 143)], awaited=frozenset({1}))
    assert wait.run() == LastSave(False, 0.0)
    assert wait.trainers[0].asked == ["terminate"]
