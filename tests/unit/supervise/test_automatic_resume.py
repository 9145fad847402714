"""`supervise.max_restarts`: which ends the launcher goes on after, how often, and what it says."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import pipelinerl.launch as launch_module
from pipelinerl.config import RunConfig
from pipelinerl.supervise.restarts import can_resume
from pipelinerl.supervise.supervisor import Outcome

COMPLETED = Outcome("completed", None, 0)
INTERRUPTED = Outcome("interrupted", "stopped by SIGTERM", 143)


def died(job: str) -> Outcome:
    return Outcome("failed", f"{job} was killed by SIGKILL.\nIts log: x", 1, job)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (died("finetune_3"), True),
        (died("actor_0"), True),
        (died("preprocessor_0"), True),
        (died("actor_llm_0"), False),  # a server is started again in place; this is the end of its cap
        (died("launch"), False),
        (Outcome("failed", "actor_0: train_dataset_names is empty", 2, "actor_0"), False),
        (INTERRUPTED, False),
        (COMPLETED, False),
    ],
)
def test_which_ends_can_be_resumed(outcome: Outcome, expected: bool) -> None:
    assert can_resume(outcome.status, outcome.exit_code, outcome.job) is expected


@pytest.mark.parametrize(
    ("max_restarts", "outcomes", "starts", "code"),
    [
        (0, [died("finetune_0")], 1, 1),
        (2, [died("finetune_0"), died("actor_0"), COMPLETED], 3, 0),
        (2, [died("finetune_0"), died("actor_0"), died("finetune_0")], 3, 1),
        (5, [died("finetune_0"), INTERRUPTED], 2, 143),
        (5, [died("actor_llm_0")], 1, 1),
    ],
)
def test_how_often(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    max_restarts: int,
    outcomes: list[Outcome],
    starts: int,
    code: int,
) -> None:
    seen: list[tuple[bool, list[str]]] = []  # (starts anew, reasons so far)

    def launch_once(composed: Any, config: RunConfig, cluster: Any, restarts: list[str]) -> Outcome:
        seen.append((config.force_restart or config.finetune.force_restart, list(restarts)))
        return outcomes[len(seen) - 1]

    monkeypatch.setattr(launch_module, "launch_once", launch_once)
    config = RunConfig.model_validate(
        {
            "output_dir": "x",
            "force_restart": True,
            "finetune": {"force_restart": True},
            "supervise": {"max_restarts": max_restarts},
        }
    )
    with caplog.at_level(logging.WARNING):
        assert launch_module.launch(SimpleNamespace(), config, SimpleNamespace()) == code  # type: ignore[arg-type]
    assert len(seen) == starts
    assert [force for force, _ in seen] == [True] + [False] * (starts - 1)
    assert seen[-1][1] == [f"{outcome.job} was killed by SIGKILL." for outcome in outcomes[: starts - 1]]
    if starts > 1:
        text = f"the run goes on by itself (1 of {max_restarts} restarts)"
        assert text in capsys.readouterr().err and text in caplog.text
