"""`supervise.max_restarts`: which ends the launcher continues after, and how often."""

from __future__ import annotations

import os
import signal
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
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError, UserError
from pipelinerl.run.node_agent import NodeAgent
from pipelinerl.run.preflight import Start
from pipelinerl.run.processes import Outcome
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.world import ClusterMember, ClusterNode

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

    checked: list[bool] = []

    def check_start(start: Start) -> list[str]:
        checked.append(start.is_restart)
        return []

    changes: dict[str, Any] = {"check_start": check_start, "bounded_by_record": lambda config: config}
    changes |= {name: lambda *_, **__: nullcontext(MagicMock()) for name in ("FreePorts",)}
    changes |= dict.fromkeys(("enter", "build_world_map", "save_config"), MagicMock())
    for name, value in {**changes, "supervise": fails}.items():
        monkeypatch.setattr(launch_module, name, value)
    monkeypatch.setattr(launch_module.logging, "basicConfig", MagicMock())
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    for restarts in ([], ["finetune_0 died"]):
        outcome = launch_module._supervised(MagicMock(), config, MagicMock(), SimpleQueue(), restarts)
        assert outcome == replace(died("finetune_0"), signum=signums[0] if signums else None)
    assert checked == [False, True]


@pytest.mark.parametrize("found", [None, RunIdentity(run_id="run-a", incarnation=1)])
def test_d3_a_node_that_does_not_see_what_the_launcher_wrote_is_refused(
    tmp_path: Path, found: RunIdentity | None
) -> None:
    """It would write its streams where nobody reads them."""
    if found is not None:
        write_identity(RunDir(tmp_path).identity_file, found)
    identity = RunIdentity(run_id="run-a", incarnation=2)
    agent = NodeAgent("h", 0, 1, silence_s=600)
    trouble = agent.begin(1, str(tmp_path), identity, 2, "token", {}, str(tmp_path))
    assert str(trouble).startswith("output_dir: got")


@pytest.mark.parametrize(
    ("cluster", "world_size", "nodes", "is_right"),
    [
        ("auto", 2, [8, 4], True),
        ("auto", 2, [8], False),
        ("auto", 2, [8, 8, 8], False),
        ("auto", 2, None, True),
        ("auto", 1, [2], True),
        ("auto", 1, [8], False),
        ("auto", 1, [2, 2], False),
        ("ray", 1, [8, 8, 8], True),
    ],
)
def test_described_nodes_are_those_of_the_command(
    cluster: str, world_size: int, nodes: list[int] | None, is_right: bool
) -> None:
    described = None if nodes is None else [{"gpus": gpus} for gpus in nodes]
    config = RunConfig.model_validate({"output_dir": "x", "world": {"cluster": cluster, "nodes": described}})
    member, machine = ClusterMember(world_size), ClusterNode("h", ("0", "1"), 1)
    if is_right:
        launch_module.check_described(config, member, machine)
        return
    with pytest.raises(ConfigError) as caught:
        launch_module.check_described(config, member, machine)
    assert caught.value.key == "world.nodes"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_launcher_on_an_existing_ray_cluster_is_the_only_one(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """`srun ... ray symmetric-run` starts it in a task of SLURM. The cluster may have no token."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": rank}
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "WORLD_SIZE", "RANK", "MASTER_ADDR", "SLURM_PTY_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**step, "MASTER_PORT": "29511", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    members: list[ClusterMember] = []

    def cluster_nodes(config: RunConfig, member: ClusterMember, machine: ClusterNode) -> Any:
        members.append(member)
        raise UserError("far enough")

    monkeypatch.setattr(launch_module, "import_module", lambda name: SimpleNamespace(cluster_nodes=cluster_nodes))
    config = RunConfig.model_validate({"output_dir": "x", "world": {"cluster": "ray"}})
    composed: Any = SimpleNamespace(members=[], config=config, search_dirs=[], help_text="")
    assert launch_module.start(lambda: composed) == EXIT_USER_ERROR
    assert members == [ClusterMember(master_port=29511)] and "RAY_AUTH_MODE" not in os.environ
