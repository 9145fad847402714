"""R1 in a run: an actor whose graders misbehave now and then goes on, with a verifier service and without one."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model
from fakes.service_process import service

TASK = """
    from pipelinerl.async_llm import llm_async_generate, make_training_text
    from pipelinerl.grading import grader, verify
    from pipelinerl.llm import Prompt
    from pipelinerl.rollouts import BaseMetrics, RolloutResult

    def load_problems(names):
        return [{"id": f"{name}{i}", "number": i} for name in names for i in range(8)]

    @grader
    def grade(text, problem):
        if problem["number"] == 3:
            raise ValueError("no grade")
        while problem["number"] == 5:
            pass
        return None if problem["number"] == 7 else 0.0

    async def generate_rollout(cfg, llm, problem, session):
        call = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": "hi"}]), session)
        found = await verify(grade, call.output.content, problem, timeout_s=0.5 if problem["number"] == 5 else 60)
        text = make_training_text(llm, call)
        text.reward = found.score
        return RolloutResult([text], BaseMetrics(reward=found.score, success=False))
"""


@pytest.mark.parametrize("with_service", [pytest.param(False, marks=pytest.mark.slow), True])
def test_r1_the_run_goes_on_and_counts_the_reasons(with_service: bool, tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    with FakeServer() as server, contextlib.ExitStack() as stack:
        run = ActorRun(tmp_path, model, [server.url], server.token, TASK, actor={"max_failure_rate": 0.9})
        if with_service:
            stack.enter_context(service(run, "verifier"))

        def set_version(version: int) -> None:
            server.version = str(version)

        # Eight whole groups, of five problems that can be graded: each problem has had its turn.
        with run.started(), CountingTrainer(run, steps=2, on_version=set_version):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    reasons = Counter(record.reason for record in run.fates if record.fate == "failed")
    assert set(reasons) & {"grader_raised", "grader_bad_result"}, reasons
    samples = [sample for group in run.groups for sample in group.samples]
    assert samples and all(sample.reward == 0.0 for sample in samples)
    assert all(group.problem_id.lstrip("train") not in {"3", "7"} or not group.samples for group in run.groups)
