"""When the evaluation behind the end of training has no server any more."""

from __future__ import annotations

import pytest

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.records import PoolChange, ServerReady
from pipelinerl.run.last_evaluation import ANSWER_S, END_S, LastEvaluation
from pipelinerl.run.policy import ExitPolicy
from pipelinerl.run.server_keeper import ServerKeeper
from pipelinerl.world import Job

NODES = {
    "one-node": ("actor", "preprocessor", "finetune"),
    "trainer-elsewhere": ("actor", "preprocessor"),
}


def job(kind: str, idx: int = 0) -> Job:
    return Job(kind, f"{kind}_{idx}", idx, idx, 0, "h", [], None, None, None, 1)


class Scene:
    """Two servers that serve, and the jobs of `kinds`. The trainer says that it is done before any of them ends."""

    def __init__(self, *kinds: str, serving: bool = True) -> None:
        servers = [job("actor_llm", 0), job("actor_llm", 1)]
        self.changes: list[PoolChange] = []
        self.keeper = ServerKeeper(servers, SuperviseConfig(), 100.0, self.changes.append, 0, now=0.0)
        self.policy = ExitPolicy([*servers, *map(job, kinds)], lambda: True)
        self.last = LastEvaluation(self.policy, self.keeper)
        if serving:
            for server in servers:
                self.ready(server.name)

    def ready(self, name: str, generation: int = 0) -> None:
        self.keeper.on_answer(ServerReady(name=name, generation=generation, version=3, time=1.0), 1.0)

    def end(self, *kinds: str) -> None:
        for kind in kinds:
            self.policy.on_exit(job(kind), 0)

    def lost(self, now: float) -> str | None:
        found = self.last.find_lost_server(now)
        return None if found is None else found[1]


@pytest.mark.parametrize("kinds", NODES.values(), ids=NODES)
def test_the_run_goes_on_while_one_server_serves(kinds: tuple[str, ...]) -> None:
    scene = Scene(*kinds)
    scene.end(*kinds[1:])
    assert scene.last.is_due
    scene.keeper.give_up("actor_llm_0", "ended after training", 10.0)
    assert scene.lost(1000.0) is None and scene.last.next_due_s(1000.0) is None
    scene.keeper.give_up("actor_llm_1", "ended after training", 2000.0)
    assert scene.lost(2000.0) is None, "the actor's own end may be on its way"
    assert scene.last.next_due_s(2000.0) == END_S
    reason = scene.lost(2000.0 + END_S)
    assert reason is not None and reason.startswith("actor_llm_1 ended after training, while the last evaluation")


def test_a_server_that_was_started_again_too_late_is_not_waited_for() -> None:
    scene = Scene("actor", "finetune")
    for name in ("actor_llm_0", "actor_llm_1"):
        assert scene.keeper.on_exit(name, -9, 5.0) is None
    scene.keeper.started("actor_llm_1", 6.0)
    scene.end("finetune")
    assert scene.lost(10.0) is None, "what the trainer said last of it may not be heard yet"
    assert scene.lost(10.0 + ANSWER_S - 1) is None and scene.last.next_due_s(10.0 + ANSWER_S - 1) == 1.0
    assert "actor_llm_1 has not got the weights" in str(scene.lost(10.0 + ANSWER_S))
    scene.ready("actor_llm_1", generation=1)
    assert scene.lost(11.0 + ANSWER_S) is None


@pytest.mark.parametrize(
    ("kinds", "ended"),
    [
        (("actor", "preprocessor", "finetune"), ()),  # training goes on
        (("actor", "preprocessor", "finetune"), ("actor", "preprocessor")),  # the evaluation is made
        (("actor",), ()),  # debug.mode=actor: nobody trains, and no server is ever given weights
        (("finetune",), ("finetune",)),  # a node above 0: the actor is another node's
    ],
)
def test_nothing_is_missed(kinds: tuple[str, ...], ended: tuple[str, ...]) -> None:
    scene = Scene(*kinds, serving=False)
    scene.end(*ended)
    scene.keeper.give_up("actor_llm_0", "ended", 10.0)
    scene.keeper.give_up("actor_llm_1", "ended", 10.0)
    assert not scene.last.is_due and scene.lost(1000.0) is None
