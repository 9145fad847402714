"""A run under SLURM: two nodes of a real cluster on this machine, `scripts/slurm.sbatch`, real servers and ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.slurm_cluster import HOSTS, SlurmCluster, slurm_cluster, why_not
from fakes.whole_run import WholeRun, environment, make_whole_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(bool(why_not()), reason=why_not())]
CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "scripts" / "slurm.sbatch"
START_S = 900.0
WHERE = """
import os
from pipelinerl.world import ClusterMember
member = ClusterMember.from_env(os.environ)
print(member.rank, member.world_size, member.master_addr)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "slurm") as started:
        yield started


def where(cluster: SlurmCluster, *start: str) -> list[str]:
    """What the launcher would take itself for, started this way."""
    told = SlurmCluster(cluster.folder, {**cluster.environ, "MASTER_ADDR": HOSTS[0]})
    lines = told.call(*start, sys.executable, "-c", WHERE, timeout_s=240).splitlines()
    return sorted(line.strip() for line in lines)


def test_what_slurm_says_of_a_start(cluster: SlurmCluster) -> None:
    both = [f"0 2 {HOSTS[0]}", f"1 2 {HOSTS[0]}"]
    assert where(cluster, "srun", "-N2", "--ntasks-per-node=1") == both
    assert where(cluster, "srun", "-N1") == ["0 1 127.0.0.1"]
    salloc = ("salloc", "--quiet", "-N2", "--ntasks-per-node=1")
    assert where(cluster, *salloc) == ["0 1 127.0.0.1"]
    assert where(cluster, *salloc, "srun") == both
    script = cluster.folder / "where.sbatch"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c '{WHERE}'\n")
    cluster.call("sbatch", "--wait", "-N2", "--ntasks-per-node=1", "--output=where.log", str(script), timeout_s=240)
    assert (cluster.folder / "where.log").read_text() == "0 1 127.0.0.1\n"


def free_port() -> int:
    with socket.create_server((HOSTS[0], 0)) as probe:
        return int(probe.getsockname()[1])


def submit(cluster: SlurmCluster, run: WholeRun, *overrides: str) -> str:
    """The number of the job that starts (or continues) the run."""
    job = ["--nodes=2", "--signal=TERM@60", "--time=60", f"--chdir={CHECKOUT}", f"--output={cluster.folder}/%j.log"]
    world = ("world.num_actor_llms=2", "world.num_finetune_ranks=1", f"world.node_port={free_port()}")
    start = run.command(*world, *overrides)[3:]
    environ = {**cluster.environ, **environment(), "PIPELINERL_PYTHON": sys.executable, "PIPELINERL_GRACE_S": "50"}
    return SlurmCluster(cluster.folder, environ).call("sbatch", "--parsable", *job, str(SCRIPT), *start)


def wait_for(what: str, seconds: float, is_so: Callable[[], bool], explain: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{what} did not come\n{explain()}"
        time.sleep(0.5)


def steps_of(run: WholeRun, incarnation: int) -> list[int]:
    done = [record for record in run.records("trainer") if record["type"] == "step_done"]
    return [record["step"] for record in done if record["incarnation"] == incarnation]


def saved_step(run: WholeRun) -> int:
    return max(int(folder.name) for folder in (run.output_dir / "finetune" / "training_state").iterdir())


def test_a_time_limit_saves_and_goes_on_a_cancel_ends_all_and_the_same_command_ends_the_run(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Node 1 has a server and no trainer rank: it has to live until node 0's has saved."""
    run = make_whole_run(tmp_path)

    def log(job: str) -> str:
        return f"{(cluster.folder / f'{job}.log').read_text()[-4000:]}\n{run.logs()}"

    def wait_for_step(job: str, step: int, incarnation: int) -> None:
        def is_there() -> bool:
            state = cluster.job(job)["JobState"]
            assert state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), f"{state}\n{log(job)}"
            return bool(steps := steps_of(run, incarnation)) and steps[-1] >= step

        wait_for(f"step {step}", START_S, is_there, lambda: log(job))

    job = submit(cluster, run, "finetune.max_train_steps=1000")
    wait_for_step(job, 3, incarnation=0)
    hours, minutes, _ = cluster.job(job)["RunTime"].split(":")
    # In whole minutes; the signal comes a minute before.
    cluster.call("scontrol", "update", f"jobid={job}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
    wait_for("the end", 300, lambda: cluster.job(job)["Restarts"] == "1", lambda: log(job))
    last_step = steps_of(run, 0)[-1]
    assert saved_step(run) == last_step, "the signal saves the present step"
    said = (cluster.folder / f"{job}.log").read_text()
    assert "stopped by SIGTERM" in said and "the job goes back into the queue" in said

    cluster.call("scontrol", "update", f"jobid={job}", "TimeLimit=60")
    wait_for_step(job, last_step + 1, incarnation=1)
    assert steps_of(run, 1)[0] == last_step + 1
    cluster.call("scancel", job)
    wait_for("the end", 120, lambda: cluster.job(job)["JobState"] == "CANCELLED", lambda: log(job))
    wait_for("the end of all processes", 60, lambda: run.living_processes() == [], lambda: log(job))
    last_step = saved_step(run)

    job = submit(cluster, run, f"finetune.max_train_steps={last_step + 2}")
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_for("the end", START_S, lambda: cluster.job(job)["JobState"] in over, lambda: log(job))
    assert cluster.job(job)["ExitCode"] == "0:0", log(job)
    assert (run.summary["status"], run.summary["steps"]) == ("completed", last_step + 2)
    audit = [sys.executable, "-m", "pipelinerl", "audit", str(run.output_dir)]
    audited = subprocess.run(audit, capture_output=True, text=True, timeout=120, check=False)
    assert audited.returncode == 0, audited.stdout
    secrets = [file for file in cluster.folder.glob("*.log") if "RAY_AUTH_TOKEN" in file.read_text()]
    assert secrets == [] and run.living_processes() == []
