"""A real SLURM cluster for a test: controller and two nodes on loopback addresses, with all files in one folder.

Needs the programs of Debian's packages slurmctld, slurmd, slurm-client and munge, in a build that lets several `slurmd`
run on one machine (`slurmd -N`), as Debian's does. Nothing outside of the folder is read or written.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
HOSTS = ("127.0.0.2", "127.0.0.3")
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_START_S = 120.0

# `pgid` signals the group of a task, as `cgroup` (the usual one) signals the task: what the task started in sessions of
# its own hears nothing. It needs no rights, and what SLURM cannot see has to end by itself.
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=20
MessageTimeout=100
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={hosts[0]} NodeHostname={host} NodeAddr={hosts[0]} Port={ports[1]} CPUs=2
NodeName={hosts[1]} NodeHostname={host} NodeAddr={hosts[1]} Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no cluster here; empty if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    return f"SLURM is not installed: no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that runs. `environ` makes SLURM's commands talk to it."""

    folder: Path
    environ: dict[str, str]

    def call(self, *command: str, timeout_s: float = 120) -> str:
        """What the command says; an error if it fails."""
        done = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields that `scontrol` shows of a job."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in self.folder.glob("*.out"))


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start it, and end it with everything that it runs."""
    folder.mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(
        _CONFIG.format(host=host, hosts=HOSTS, ports=_free_ports(3), user=getpass.getuser(), folder=folder)
    )
    cluster = SlurmCluster(folder, {**os.environ, "PATH": _PATH, "SLURM_CONF": str(config)})
    files = [f"--{name}={folder}/munge{suffix}" for name, suffix in _MUNGE_FILES]
    with ExitStack() as stack:
        # Last to end: the others sign what they say by it.
        _start(stack, cluster, "munged", ["munged", "--foreground", "--force", *files])
        _wait_for(cluster, lambda: (folder / "munge.sock").exists(), "munge")
        _start(stack, cluster, "slurmctld", ["slurmctld", "-D"])
        for node in HOSTS:
            _start(stack, cluster, f"slurmd-{node}", ["slurmd", "-D", "-N", node])
        _wait_for(cluster, lambda: _idle_nodes(cluster) == len(HOSTS), "the nodes")
        stack.callback(_end_jobs, cluster)
        yield cluster


_MUNGE_FILES = (
    ("key-file", ".key"),
    ("socket", ".sock"),
    ("pid-file", ".pid"),
    ("log-file", ".log"),
    ("seed-file", ".seed"),
)


def _start(stack: ExitStack, cluster: SlurmCluster, name: str, command: Sequence[str]) -> None:
    with (cluster.folder / f"{name}.out").open("wb") as out:
        daemon = subprocess.Popen(command, env=cluster.environ, stdout=out, stderr=out, cwd=cluster.folder)
    stack.callback(_end, daemon)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _end_jobs(cluster: SlurmCluster) -> None:
    """What a failed test left: the daemons do not end the jobs when they end."""
    cluster.call("scancel", f"--user={getpass.getuser()}")
    _wait_for(cluster, lambda: not cluster.call("squeue", "--noheader"), "the end of all jobs")


def _idle_nodes(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["scontrol", "show", "nodes"], env=cluster.environ, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.count("State=IDLE ")


def _wait_for(cluster: SlurmCluster, is_there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _START_S
    while not is_there():
        assert time.monotonic() < end, f"{what} did not come up\n{cluster.logs()}"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]
