"""Life and death of a run over two nodes on Ray: two launchers on two loopback addresses, whose jobs are small scripts.

Whatever dies is named within 30 s, and nothing is left on either node, of the jobs or of Ray.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.hosts import ADDRESSES, Hosts, some_hosts, why_not
from fakes.ports import free_port

from pipelinerl.tiny.build import build_tiny_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DRIVER = Path(__file__).parents[1] / "fakes" / "ray_run.py"
# Ray takes 127.0.0.1 for a name of the machine's own address.
HOSTS = ("127.0.0.2", "127.0.0.3")
NAMED_S, START_S = 30.0, 120.0
SLEEP = """
import os, sys, time
from pathlib import Path
from pipelinerl.role import end_with_launcher
from pipelinerl.rundir.heartbeat import Heartbeat
end_with_launcher()
heartbeat = Heartbeat(Path(sys.argv[1]) / sys.argv[2] / "heartbeat.json", 1).start()
with (Path(sys.argv[1]) / f"starts_{sys.argv[2]}").open("a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(300)
"""
# Notes what it inherited, and ends well once its file is there.
ENDS = """
import json, os, sys, time
from pathlib import Path
root = Path(sys.argv[1])
(root / f"environ_{sys.argv[2]}.json").write_text(json.dumps(dict(os.environ)))
while not (root / "end").exists():
    time.sleep(0.1)
"""
# Fills the temporary folder of its node, and goes on.
FILLS = (
    """
with open("/tmp/filling", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(2**16))
    except OSError as error:
        print(error)
"""
    + SLEEP
)
# Needs a while to save after SIGTERM.
SAVES = """
import os, signal, sys, time
from pathlib import Path
root = Path(sys.argv[1])
def save(*args):
    time.sleep(4)
    (root / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(root / f"starts_{sys.argv[2]}").write_text(f"{os.getpid()}\\n")
time.sleep(300)
"""


class TwoNodes:
    """Two launchers in one run directory, on loopback addresses or on two hosts."""

    def __init__(self, root: Path, model: Path, hosts: Hosts | None = None) -> None:
        self.root = root
        self.hosts = hosts
        self.model = str(model)
        self.port = str(free_port())
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._words: list[str] = []
        self.before: dict[int, list[str]] = {}  # words before the launcher of a node

    def start(self, jobs: dict[str, str], tokens: tuple[str, str] = ("t" * 32, "t" * 32), **keys: Any) -> None:
        self.describe(jobs, **keys)
        for rank in (0, 1):
            self.start_node(rank, tokens[rank])

    def describe(self, jobs: dict[str, str], **keys: Any) -> None:
        self._words = [str(DRIVER), str(self.root), json.dumps(jobs), json.dumps(keys)]

    def start_node(self, rank: int, token: str = "t" * 32) -> None:
        addresses, before = (
            (HOSTS, self.before.get(rank, [])) if self.hosts is None else (ADDRESSES, self.hosts.on(rank))
        )
        place = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": addresses[0]}
        environ = {
            **os.environ,
            **place,
            "PIPELINERL_NODE_ADDRESS": addresses[rank],
            "NODE_PORT": self.port,
            "MODEL_PATH": self.model,
            "RAY_AUTH_TOKEN": token,
            f"ON_{rank}": "yes",
        }
        with (self.root.parent / f"launcher_{rank}.log").open("a") as log:
            words = [*before, sys.executable, *self._words]
            self.launchers.append(subprocess.Popen(words, env=environ, stdout=log, stderr=log))

    def said(self, rank: int) -> str:
        log = self.root.parent / f"launcher_{rank}.log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, file: str, lines: int = 1) -> list[int]:
        """The process ids that a job noted at its starts."""
        end = time.monotonic() + START_S
        while not (path := self.root / file).exists() or len(path.read_text().splitlines()) < lines:
            assert time.monotonic() < end and self.launchers[0].poll() is None, self.said(0) + self.said(1)
            time.sleep(0.1)
        return [int(line) for line in path.read_text().splitlines() if line.isdecimal()]

    def wait_until_said(self, rank: int, text: str) -> None:
        end = time.monotonic() + START_S
        while text not in self.said(rank):
            assert time.monotonic() < end and all(each.poll() is None for each in self.launchers), self.said(rank)
            time.sleep(0.2)

    def below(self, rank: int, *words: str) -> psutil.Process:
        """The process of a node with these words in its command line."""
        processes = psutil.Process(self.launchers[rank].pid).children(recursive=True)
        return next(each for each in processes if all(word in " ".join(each.cmdline()) for word in words))

    def end(self, limit_s: float = NAMED_S) -> tuple[list[int], str]:
        """(exit codes, reason), once nothing is left."""
        codes = [launcher.wait(limit_s) for launcher in self.launchers]
        end = time.monotonic() + NAMED_S
        while left := self.left():
            assert time.monotonic() < end, [" ".join(each.cmdline())[:200] for each in left]
            time.sleep(0.2)
        return codes, str(json.loads((self.root / "summary.json").read_text())["reason"])

    def left(self) -> list[psutil.Process]:
        """Processes of this run and of its Ray clusters."""
        found = []
        for process in psutil.process_iter(["cmdline", "status", "environ"]):
            words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
            is_ours = str(self.root) in words or environ.get("NODE_PORT") == self.port
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


def wait_for_port(host: str, port: int) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=1).close()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=3, warmup=None, progress=lambda line: None)


@pytest.fixture
def nodes(tmp_path: Path, model: Path) -> Iterator[TwoNodes]:
    nodes = TwoNodes(tmp_path / "run", model)
    yield nodes
    for process in [*nodes.launchers, *nodes.left()]:
        process.kill()


@pytest.fixture
def apart(tmp_path: Path, model: Path) -> Iterator[TwoNodes]:
    """Nodes whose network can be cut."""
    if reason := why_not():
        pytest.skip(reason)
    with some_hosts(2) as hosts:
        nodes = TwoNodes(tmp_path / "run", model, hosts)
        yield nodes
        for process in [*nodes.launchers, *nodes.left()]:
            process.kill()


def test_jobs_of_two_nodes_end_as_one_run(nodes: TwoNodes) -> None:
    nodes.start({"1:actor_llm_0": SLEEP, "1:verifier_0": SLEEP, "0:actor_0": ENDS})
    nodes.wait_for("starts_actor_llm_0")
    nodes.wait_for("environ_actor_0.json")
    (nodes.root / "end").touch()
    codes, reason = nodes.end()
    assert (codes, reason) == ([0, 0], "None") and "node 1: completed" in nodes.said(1)
    environ = json.loads((nodes.root / "environ_actor_0.json").read_text())
    assert (environ["ON_0"], environ["PIPELINERL_SERVER_TOKEN"]) == ("yes", "token-of-test")
    assert not any(name.startswith("RAY_") for name in environ)
    token = b"t" * 32
    assert not any(token in file.read_bytes() for file in nodes.root.rglob("*") if file.is_file())


def test_a_far_server_is_restarted_in_place(nodes: TwoNodes) -> None:
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": ENDS}, server_restart_backoff_s=0.1)
    first = nodes.wait_for("starts_verifier_0")[0]
    os.kill(first, signal.SIGKILL)
    _, second = nodes.wait_for("starts_verifier_0", lines=2)
    assert nodes.below(1, "ray::NodeAgent").pid == psutil.Process(second).ppid()
    (nodes.root / "end").touch()
    assert nodes.end() == ([0, 0], "None")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_on_any_node_stops_the_run(nodes: TwoNodes, rank: int) -> None:
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": SLEEP})
    nodes.wait_for("starts_verifier_0")
    nodes.wait_for("starts_actor_0")
    nodes.launchers[rank].terminate()
    assert nodes.end() == ([143, 143], "stopped by SIGTERM")


def test_l5_trainers_save_after_one_signal_to_all_nodes(nodes: TwoNodes) -> None:
    """As `scancel` and preemption send it. What a node says of its signal is not a second one of the launcher."""
    nodes.start({"1:finetune_0": SAVES, "0:actor_0": SLEEP})
    nodes.wait_for("starts_finetune_0")
    nodes.wait_for("starts_actor_0")
    for launcher in nodes.launchers:
        launcher.terminate()
    assert nodes.end() == ([143, 143], "stopped by SIGTERM")
    assert (nodes.root / "saved").exists()


#: What is killed on which node, and what the reason has to say.
VICTIMS = {
    "a job": (1, ("import os", "verifier_0"), "verifier_0 ended"),
    "the agent": (1, ("ray::NodeAgent",), "node 1 (127.0.0.3) is gone"),
    "a raylet": (1, ("raylet/raylet",), "node 1 (127.0.0.3)"),
    "a launcher": (1, (), "node 1 (127.0.0.3)"),
    "the raylet of the head": (0, ("raylet/raylet",), "node 0 (127.0.0.2)"),
    "the head": (0, ("gcs_server",), "node 0 (127.0.0.2)"),
}


@pytest.mark.parametrize(("rank", "words", "reason"), VICTIMS.values(), ids=VICTIMS)
def test_what_is_killed_is_named(nodes: TwoNodes, rank: int, words: tuple[str, ...], reason: str) -> None:
    # Without its head the run cannot be resumed.
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": SLEEP}, max_server_restarts=0, max_restarts=int(rank == 0))
    nodes.wait_for("starts_verifier_0")
    nodes.wait_for("starts_actor_0")
    (nodes.below(rank, *words) if words else psutil.Process(nodes.launchers[rank].pid)).kill()
    codes, said = nodes.end()
    assert codes[0] == 1 and codes[1] in (1, -signal.SIGKILL)
    assert reason in said


def test_l9_nothing_outlives_the_launcher_of_node_0(nodes: TwoNodes) -> None:
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": SLEEP})
    nodes.wait_for("starts_verifier_0")
    nodes.wait_for("starts_actor_0")
    nodes.launchers[0].kill()
    assert nodes.launchers[1].wait(2 * NAMED_S) == 1
    end = time.monotonic() + NAMED_S
    while left := nodes.left():
        assert time.monotonic() < end, [" ".join(each.cmdline())[:200] for each in left]
        time.sleep(0.2)


def test_a_run_is_resumed_when_a_node_comes_back(nodes: TwoNodes) -> None:
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": ENDS}, max_restarts=1)
    nodes.wait_for("starts_verifier_0")
    nodes.launchers[1].kill()
    nodes.start_node(1)
    nodes.wait_for("starts_verifier_0", lines=2)
    (nodes.root / "end").touch()
    codes, _ = nodes.end()
    assert (codes[0], codes[2]) == (0, 0)


@pytest.mark.parametrize(("first", "said"), [(0, "1 node(s) of 2"), (1, "waiting for node 0")])
def test_a_node_that_joins_late_is_waited_for(nodes: TwoNodes, first: int, said: str) -> None:
    nodes.describe({"1:verifier_0": SLEEP, "0:actor_0": ENDS})
    nodes.start_node(first)
    nodes.wait_until_said(first, said)
    time.sleep(10)
    nodes.start_node(1 - first)
    nodes.wait_until_said(1, "joining node 0")
    nodes.root.mkdir(exist_ok=True)
    (nodes.root / "end").touch()
    assert nodes.end(START_S) == ([0, 0], "None")


def test_a_full_disk_of_the_far_node_ends_nothing(nodes: TwoNodes) -> None:
    """Its temporary folder, where Ray has its files and the agent leaves what the run came to."""
    shared, other = nodes.root.parents[1], "/mnt"
    mounts = [f"mount --bind {shared} {other}", "mount -t tmpfs -o size=64m none /tmp", f"mkdir -p {shared}"]
    words = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        "\n".join([*mounts, f"mount --bind {other} {shared}", 'exec "$@"']),
        "-",
    ]
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.decode().strip()}")
    nodes.before = {1: words}
    nodes.start({"1:verifier_0": FILLS, "0:actor_0": ENDS})
    nodes.wait_for("starts_verifier_0")
    assert "No space left" in (nodes.root / "verifier_0" / "stdout.log").read_text()
    time.sleep(15)
    assert [each.poll() for each in nodes.launchers] == [None, None], nodes.said(0) + nodes.said(1)
    (nodes.root / "end").touch()
    assert nodes.end() == ([0, 0], "None")


def test_a_node_that_is_silent_for_a_moment_is_kept(nodes: TwoNodes) -> None:
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": ENDS})
    nodes.wait_for("starts_verifier_0")
    agent = nodes.below(1, "ray::NodeAgent")
    agent.suspend()
    time.sleep(5)  # half of supervise.heartbeat_timeout_s
    agent.resume()
    time.sleep(8)
    assert nodes.launchers[0].poll() is None, nodes.said(0)
    (nodes.root / "end").touch()
    assert nodes.end() == ([0, 0], "None")


def test_a_node_that_stays_silent_is_lost(nodes: TwoNodes) -> None:
    nodes.start({"1:verifier_0": SLEEP, "0:actor_0": SLEEP})
    nodes.wait_for("starts_verifier_0")
    nodes.wait_for("starts_actor_0")
    nodes.below(1, "ray::NodeAgent").suspend()
    codes, reason = nodes.end()
    assert codes == [1, 1] and "node 1 (127.0.0.3) has sent no sign of life for 10 s" in reason


def test_a_network_that_is_cut_for_ten_seconds_costs_nothing(apart: TwoNodes) -> None:
    apart.start({"1:verifier_0": SLEEP, "0:actor_0": ENDS}, heartbeat_timeout_s=20)
    apart.wait_for("starts_verifier_0")
    assert apart.hosts is not None
    apart.hosts.cut()
    time.sleep(10)
    apart.hosts.join()
    time.sleep(15)
    assert apart.launchers[0].poll() is None, apart.said(0)
    (apart.root / "end").touch()
    assert apart.end() == ([0, 0], "None")


def test_a_network_that_stays_cut_ends_the_run_on_both_sides(apart: TwoNodes) -> None:
    apart.start({"1:verifier_0": SLEEP, "0:actor_0": SLEEP})
    apart.wait_for("starts_verifier_0")
    apart.wait_for("starts_actor_0")
    assert apart.hosts is not None
    apart.hosts.cut()
    began = time.monotonic()
    codes, reason = apart.end()
    print(f"over after {time.monotonic() - began:.0f} s")
    assert codes == [1, 1] and f"node 1 ({ADDRESSES[1]})" in reason


def test_a_ray_cluster_that_is_there_is_used_and_left_alone(nodes: TwoNodes) -> None:
    """`RAY_ADDRESS`; the nodes are those of the cluster, the launcher's first."""
    address = f"{HOSTS[0]}:{nodes.port}"
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "NODE_PORT": nodes.port}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0", "--num-cpus=1"]
    start += ["--object-store-memory=80000000", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
    head = ["--head", f"--port={nodes.port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
    with ExitStack() as stack:
        for host, more in zip(HOSTS, (head, [f"--address={address}"]), strict=True):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
            words = [*start, *more, f"--node-ip-address={host}", f"--temp-dir={folder}"]
            ray = subprocess.Popen(words, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)
            stack.callback(ray.wait)
            stack.callback(ray.kill)
            wait_for_port(HOSTS[0], int(nodes.port))
        words = [sys.executable, str(DRIVER), str(nodes.root), json.dumps({"1:verifier_0": SLEEP, "0:actor_0": ENDS})]
        world = {"cluster": "ray", "nodes": [{"gpus": 0}, {"gpus": 0}]}
        run = {**environ, "WORLD": json.dumps(world), "RAY_ADDRESS": address, "MODEL_PATH": nodes.model}
        with (nodes.root.parent / "launcher_0.log").open("w") as log:
            nodes.launchers.append(subprocess.Popen(words, env={**os.environ, **run}, stderr=log))
        nodes.wait_for("starts_verifier_0")
        (nodes.root / "end").touch()
        assert nodes.launchers[0].wait(NAMED_S) == 0, nodes.said(0)
        left = [" ".join(process.cmdline()) for process in nodes.left()]
        assert sum("raylet/raylet" in words for words in left) == 2
        assert not any("NodeAgent" in words or str(nodes.root) in words for words in left)


def test_d4_the_port_of_another_run_is_refused(nodes: TwoNodes) -> None:
    with socket.create_server((HOSTS[0], int(nodes.port))):
        nodes.start({"0:actor_0": ENDS})
        assert nodes.launchers[0].wait(60) == 2 and "world.node_port" in nodes.said(0)


def test_a_head_that_ends_while_nodes_are_awaited_is_named(nodes: TwoNodes) -> None:
    """Node 1 cannot join; Ray itself would wait for the head."""
    nodes.start({"0:actor_0": ENDS}, tokens=("t" * 32, "u" * 32))
    nodes.wait_until_said(0, "1 node(s) of 2")
    nodes.below(0, "gcs_server").kill()
    assert nodes.launchers[0].wait(2 * NAMED_S) == 1 and "Ray" in nodes.said(0)
    nodes.launchers[1].wait(2 * NAMED_S)
    assert nodes.left() == []


def test_o5_a_wrong_token_joins_nothing(nodes: TwoNodes) -> None:
    nodes.start({"0:actor_0": ENDS}, tokens=("t" * 32, "u" * 32), nodes_timeout_s=20)
    assert nodes.launchers[0].wait(120) == 2 and "1 node(s) of 2" in nodes.said(0)
    nodes.launchers[1].wait(120)
    assert nodes.launchers[1].returncode != 0 and nodes.left() == []
