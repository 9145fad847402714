"""A run over several nodes on Ray: launchers on loopback addresses of one machine or in network namespaces, with real
servers and ranks on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fakes.hosts import ADDRESSES, Hosts, some_hosts, why_not
from fakes.ports import free_port
from fakes.whole_run import WholeRun, make_whole_run

from pipelinerl.config.resources import RedisStreams
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.redis_server import RedisServer

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
RUN_S = 900
# Ray takes 127.0.0.1 for a name of the machine's own address.
HOSTS = ("127.0.0.2", "127.0.0.3")


@contextmanager
def some_nodes(
    run: WholeRun, *overrides: str, hosts: Hosts | None = None, **on_node_0: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """All launchers, node 0 first; what is left of them is ended. `hosts`: where they are, if not on loopback."""
    node_port, addresses = free_port(), HOSTS if hosts is None else ADDRESSES[: len(hosts.names)]
    nodes = [
        run.start(
            f"world.node_port={node_port}",
            *overrides,
            before=() if hosts is None else hosts.on(rank),
            extra_env={
                "WORLD_SIZE": str(len(addresses)),
                "RANK": str(rank),
                "MASTER_ADDR": addresses[0],
                "PIPELINERL_NODE_ADDRESS": host,
                "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
                **({} if rank else on_node_0),
            },
        )
        for rank, host in enumerate(addresses)
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


needs_hosts = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")


@pytest.mark.parametrize(
    ("streams", "num_hosts"),
    [
        ("files", 0),
        ("redis", 0),
        pytest.param("files", 2, marks=needs_hosts),
        pytest.param("files", 3, marks=needs_hosts),
    ],
)
def test_nodes_train_as_one_run(tmp_path: Path, streams: str, num_hosts: int) -> None:
    """The trainer is on node 0, and a server on each of the others. Without hosts there are two loopback addresses."""
    run, addresses = make_whole_run(tmp_path), ADDRESSES[:num_hosts] or HOSTS
    with ExitStack() as stack:
        environ, hosts = {}, stack.enter_context(some_hosts(num_hosts)) if num_hosts else None
        if streams == "redis":
            server = stack.enter_context(RedisServer(tmp_path / "redis", RedisStreams()))
            environ = {"PIPELINERL_REDIS_URL": server.url}
        keys = f"streams={streams}", f"world.num_actor_llms={len(addresses) - 1}"
        nodes = stack.enter_context(some_nodes(run, *keys, hosts=hosts, **environ))
        texts = texts_of(nodes)
        audit = [sys.executable, "-m", "pipelinerl", "audit", str(run.output_dir)]
        audited = subprocess.run(audit, env={**os.environ, **environ}, timeout=120, check=False).returncode
    assert [node.returncode for node in nodes] == [0] * len(nodes), f"{texts}\n{run.logs()}"
    assert "node 1: completed" in texts[1] and audited == 0
    assert run.summary["status"] == "completed"
    assert run.summary["logprob_abs_diff_mean"] < 1e-3
    assert run.summary["success_after"] > run.summary["success_before"]
    jobs = json.loads(RunDir(run.output_dir).world_file.read_text())["jobs"]
    assert [job["host"] for job in jobs if job["kind"] == "finetune"] == [addresses[0]]
    assert {job["host"] for job in jobs if job["kind"] == "actor_llm"} == set(addresses[1:])
    assert run.living_processes() == []
