"""A black-box agent inside a rollout worker, from problem to published group."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model

TASK = """
import openai

from pipelinerl.agents import black_box


def load_problems(dataset_names):
    return [{"id": f"{name}-{i}", "dataset": name, "words": f"w{10 + i}"} for name in dataset_names for i in range(4)]


def rollout(base_url, api_key, problem):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": problem["words"]}]
        for _ in range(2):
            answer = client.chat.completions.create(model="actor", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "w7"}]
    return 0.5, {"answers": 2}


generate_rollout = black_box(rollout)
"""


def test_groups_of_a_black_box_agent(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    model = save_random_model(tmp_path / "model")
    with FakeServer() as server:
        run = ActorRun(tmp_path, model, [server.url], server.token, task=TASK)

        def on_version(version: int) -> None:
            server.version = str(version)

        with run.started(), CountingTrainer(run, 1, on_version):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    (group, *_) = run.groups
    assert len(group.samples) == 2 and group.failed_rollouts == 0
    assert {summary.metrics["answers"] for summary in group.rollouts} == {2.0}
    for sample in group.samples:
        assert sample.metadata["turns"] == 2 and sample.reward == 0.5
        assert sample.num_trained_tokens == 10
