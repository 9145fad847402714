"""R1 for games in a run: an actor whose games misbehave now and then goes on; they run in an environment service."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model
from fakes.service_process import service

TASK = """
    import os

    from pipelinerl.games import GameStep, play, text_game

    def load_problems(names):
        common = {"max_turns": 2, "success_reward": 1.0}
        return [
            {"id": f"{name}{i}", "dataset": name, "number": i, **common} for name in names for i in range(8)
        ]

    @text_game
    class Game:
        def __init__(self, problem):
            self.number = problem["number"]
            self.moves = 0

        def start(self):
            return "w5 w6"

        def act(self, action):
            self.moves += 1
            if self.number == 3:
                raise ValueError("no move")
            while self.number == 5:
                pass
            # The games are not in the process of the rollouts.
            away = "rollout_worker" not in open(f"/proc/{os.getpid()}/cmdline").read()
            return GameStep("w7", 0.5 if away else -1.0, self.moves == 2)

        def close(self):
            pass

    async def generate_rollout(cfg, llm, problem, session):
        return await play(cfg, llm, problem, session, Game)
"""


def test_r1_games_fail_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    with FakeServer() as server:
        settings_of_service = {"_target_": "pipelinerl.games.create_app", "processes": 1, "timeout_s": 1.5}
        settings = {"environment": settings_of_service, "actor": {"max_failure_rate": 0.9}}
        run = ActorRun(tmp_path, model, [server.url], server.token, TASK, **settings)

        def set_version(version: int) -> None:
            server.version = str(version)

        with (
            service(run, "environment"),
            run.started(),
            # Eight whole groups, of six problems that can be solved: each problem has had its turn.
            CountingTrainer(run, steps=2, on_version=set_version),
        ):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    reasons = Counter(record.reason for record in run.fates if record.fate == "failed")
    assert set(reasons) & {"environment_raised", "environment_timeout"}, reasons
    samples = [sample for group in run.groups for sample in group.samples]
    assert samples and all(sample.reward == 1.0 and sample.metadata["turns"] == 2 for sample in samples)
    assert all(group.problem_id.lstrip("train") not in {"3", "5"} or not group.samples for group in run.groups)
