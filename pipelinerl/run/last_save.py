"""Behind a signal: trainers of all nodes save a training state while all servers still live. Used by the supervisor.

Waits on the supervisor's queue, at most `grace_s`: for the ends of this node's trainers, and for the other nodes' word
that theirs have ended. A trainer in the middle of a step still has to give its weights to the servers, which may be on
nodes without trainers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl.run.processes import Child, ChildExited, Event, Interrupted, NodeSaved

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OtherLaunchers:
    """What the supervisor says to the launchers of the other nodes. Without any, it says nothing and waits for none.

    Attributes:
        ranks: the nodes whose word is awaited: on node 0 all others, on the others node 0.
        hear_outcome: called with the `Outcome` as soon as it is known, before processes are ended.
        hear_saved: called when no trainer of this node is left to save.
    """

    ranks: frozenset[int] = frozenset()
    hear_outcome: Callable[[Any], object] = lambda outcome: None
    hear_saved: Callable[[], object] = lambda: None


#: Of a run on one node.
NO_OTHERS = OtherLaunchers()


@dataclass(frozen=True)
class LastSave:
    """How the wait went: whether a second signal cut it short, and what is left of `grace_s`, in seconds."""

    is_cut_short: bool
    left_s: float


def let_trainers_save(
    trainers: Mapping[str, Child],
    others: OtherLaunchers,
    next_event: Callable[[float], Event | None],
    grace_s: float,
    clock: Callable[[], float],
    is_signalled: bool,
) -> LastSave:
    """Ask this node's trainers to save, and block until all trainers ended, the time is over, or a second signal came.

    Args:
        trainers: living trainer ranks of this node, by name.
        others: the launchers of the other nodes.
        next_event: the next event, or None if none came in so many seconds.
        is_signalled: whether this launcher itself got a signal. If it only heard of one, its own may still come: a
            scheduler signals every node, not all at the same moment.
    """
    start = clock()
    own, awaited = dict(trainers), set(others.ranks)
    for child in own.values():
        child.terminate()
    if not own:
        others.hear_saved()
    while (own or awaited) and (left_s := start + grace_s - clock()) > 0:
        event = next_event(left_s)
        if isinstance(event, ChildExited) and event.name in own:
            del own[event.name]
            if not own:
                others.hear_saved()
        elif isinstance(event, NodeSaved):
            awaited.discard(event.rank)
        elif isinstance(event, Interrupted):
            if is_signalled:
                return LastSave(True, 0.0)
            is_signalled = True
    for child in own.values():
        # The stacks say what it hangs in, a collective for instance.
        logger.warning("%s does not end; where its threads are is in %s", child.name, child.stderr.file)
        child.dump_stacks()
    return LastSave(False, grace_s - (clock() - start))
