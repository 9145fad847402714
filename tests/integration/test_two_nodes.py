"""A run over two nodes: two launchers, here on two loopback addresses of one machine, with real servers and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fakes.ports import free_port
from fakes.whole_run import WholeRun, make_whole_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
SPLIT = ("world.num_actor_llms=2", "world.num_finetune_ranks=2")
RUN_S = 900


@contextmanager
def two_nodes(run: WholeRun, *overrides: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Both launchers, node 0 first; what is left of them is ended."""
    node_port = free_port()
    nodes = [
        run.start(
            *SPLIT,
            f"world.node_port={node_port}",
            *overrides,
            extra_env={
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "MASTER_PORT": str(free_port()),
                "PIPELINERL_NODE_HOSTS": "127.0.0.1,127.0.0.2",
                "PIPELINERL_NODE_SECRET": "0123456789abcdef",
            },
        )
        for rank in (0, 1)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                node.wait(60)


def texts_of(nodes: list[subprocess.Popen[str]]) -> list[str]:
    return [node.communicate(timeout=RUN_S)[0] for node in nodes]


def wait_for_line(node: subprocess.Popen[str], part: str) -> None:
    assert node.stdout is not None
    for line in node.stdout:
        if part in line:
            return
    raise AssertionError(f"the launcher never said {part!r}")


def test_two_nodes_train_as_one_run(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    with two_nodes(run) as nodes:
        texts = texts_of(nodes)
    assert [node.returncode for node in nodes] == [0, 0], f"{texts}\n{run.logs()}"
    assert "joined" in texts[0] and "node 1: completed" in texts[1]
    assert run.summary["status"] == "completed"
    assert run.summary["logprob_abs_diff_mean"] < 1e-3
    assert run.summary["success_after"] > run.summary["success_before"]
    plan = {job: (run.output_dir / job / "command.sh").exists() for job in ("actor_llm_1", "finetune_1", "actor_0")}
    assert plan == dict.fromkeys(plan, True)
    assert run.living_processes() == []


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_l3_a_death_on_node_1_ends_both(tmp_path: Path, victim: str) -> None:
    run = make_whole_run(tmp_path)
    with two_nodes(run, "finetune.max_train_steps=1000") as nodes:
        wait_for_line(nodes[0], "evaluation at version 0")
        if victim == "launcher":
            os.kill(nodes[1].pid, signal.SIGKILL)
        else:
            (rank,) = (p for p in psutil.Process(nodes[1].pid).children() if "finetune_1" in p.cmdline())
            rank.kill()
        texts = texts_of(nodes)
    assert nodes[0].returncode == 1
    reason = run.summary["reason"]
    assert "node 1" in reason
    assert ("is gone" if victim == "launcher" else "finetune_1") in reason, texts
    assert run.living_processes() == []
