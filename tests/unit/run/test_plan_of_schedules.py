"""What `dry_run=true` says about schedules and shared devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from pipelinerl.config import RunConfig
from pipelinerl.run.plan_text import plan_of
from pipelinerl.world import Cluster, build_world_map


@dataclass
class AnyPort:
    def take(self, node_rank: int, preferred: int, key: str) -> int:
        return preferred


@pytest.mark.parametrize(
    ("gpus", "config", "line"),
    [
        (0, {}, "schedule pipeline, weights by gloo"),
        (2, {"schedule": "concurrent"}, "schedule concurrent, weights by nccl"),
        (
            2,
            {"schedule": "conventional", "steps_per_generation": 2, "world": {"placement": "colocated"}},
            "schedule conventional (2 steps per generation), weights by ipc, nccl, colocated: servers sleep "
            "(level auto) while the trainer trains",
        ),
        (
            0,
            {"schedule": "conventional", "world": {"placement": "colocated"}},
            "schedule conventional (1 steps per generation), weights by gloo, colocated: servers pause while the "
            "trainer trains",
        ),
    ],
)
def test_the_plan_says_who_waits_for_whom(gpus: int, config: dict[str, Any], line: str) -> None:
    run = RunConfig(output_dir="x", **config)
    cluster = Cluster.from_env({}, lambda: [str(index) for index in range(gpus)], cores=2)
    world = build_world_map(run, cluster, AnyPort())
    console = Console(width=400, no_color=True)
    with console.capture() as captured:
        console.print(plan_of(run, world, []))
    assert line in captured.get()
