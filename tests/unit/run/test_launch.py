"""`supervise.max_restarts`: which ends the launcher continues after, and how often."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

import pipelinerl.launch as launch_module
from pipelinerl.config import RunConfig
from pipelinerl.run.node_agent import NodeAgent, Order
from pipelinerl.run.processes import Outcome
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity

COMPLETED = Outcome("completed", None, 0)
INTERRUPTED = Outcome("interrupted", "stopped by SIGTERM", 143)


def died(job: str) -> Outcome:
    return Outcome("failed", f"{job} was killed by SIGKILL.\nIts log: x", 1, job)


@pytest.mark.parametrize(
    ("max_restarts", "outcomes", "code"),
    [
        (0, [died("finetune_0")], 1),
        (2, [died("finetune_0"), died("actor_0"), COMPLETED], 0),
        (2, [died("finetune_0"), died("actor_0"), died("finetune_0")], 1),
        (5, [died("finetune_0"), INTERRUPTED], 143),
        (5, [died("actor_llm_0")], 1),
        (5, [replace(died("finetune_0"), signum=15)], 1),
    ],
)
def test_how_often(monkeypatch: pytest.MonkeyPatch, max_restarts: int, outcomes: list[Outcome], code: int) -> None:
    seen: list[tuple[bool, list[str]]] = []  # (starts anew, reasons so far)

    told: list[Outcome] = []

    def supervised(composed: Any, config: RunConfig, place: Any, events: Any, restarts: list[str]) -> Outcome:
        seen.append((config.force_restart, list(restarts)))
        return outcomes[len(seen) - 1]

    monkeypatch.setattr(launch_module, "_supervised", supervised)
    place = SimpleNamespace(end=told.append)
    supervise = {"max_restarts": max_restarts}
    config = RunConfig.model_validate({"output_dir": "x", "force_restart": True, "supervise": supervise})
    composed: Any = SimpleNamespace()
    assert launch_module.launch(composed, config, lambda events: nullcontext(cast(Any, place))) == code
    assert told == outcomes[-1:], "nodes hear of the last end alone"
    assert [force for force, _ in seen] == [True] + [False] * (len(outcomes) - 1)
    assert seen[-1][1] == [f"{outcome.job} was killed by SIGKILL." for outcome in outcomes[:-1]]


@pytest.mark.parametrize("signums", [[], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_a_signal_while_a_run_fails_is_in_its_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signums: list[int]
) -> None:
    """The supervisor has its outcome and reads no more events; processes are being ended, the summary is written."""

    def fails(*arguments: Any) -> Outcome:
        for signum in signums:
            os.kill(os.getpid(), signum)
        return died("finetune_0")

    changes: dict[str, Any] = {"check_start": lambda start: [], "bounded_by_record": lambda config: config}
    changes |= {name: lambda *_, **__: nullcontext(MagicMock()) for name in ("FreePorts",)}
    changes |= dict.fromkeys(("enter", "build_world_map", "save_config", "build_commands"), MagicMock())
    for name, value in {**changes, "supervise": fails}.items():
        monkeypatch.setattr(launch_module, name, value)
    monkeypatch.setattr(launch_module.logging, "basicConfig", MagicMock())
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    outcome = launch_module._supervised(MagicMock(), config, MagicMock(), SimpleQueue(), [])
    assert outcome == replace(died("finetune_0"), signum=signums[0] if signums else None)


@pytest.mark.parametrize("found", [None, RunIdentity(run_id="run-a", incarnation=1)])
def test_d3_a_node_that_does_not_see_what_the_launcher_wrote_is_refused(
    tmp_path: Path, found: RunIdentity | None
) -> None:
    """It would write its streams where nobody reads them."""
    if found is not None:
        write_identity(RunDir(tmp_path).identity_file, found)
    identity = RunIdentity(run_id="run-a", incarnation=2)
    agent = NodeAgent("h", 0, 1, silence_s=600)
    trouble = agent.begin(Order(str(tmp_path), identity, 1, 2, "token", {}, str(tmp_path), sys.executable))
    assert str(trouble).startswith("output_dir: got")
