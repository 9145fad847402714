"""Which starts under SLURM are starts on several nodes."""

from __future__ import annotations

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.launch import require_token
from pipelinerl.world import ClusterMember

# What SLURM 22.05 sets in the script of `sbatch --nodes=2 --ntasks-per-node=1`, and in the task of `srun` on node 1.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "gpu[08-09]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
SECOND_TASK = {
    **BATCH_SCRIPT,
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "MASTER_ADDR": "gpu08",
}
SALLOC_SHELL = {key: value for key, value in BATCH_SCRIPT.items() if key not in ("SLURM_NODEID", "SLURM_PROCID")}
# With LaunchParameters=use_interactive_step, the shell of `salloc` is a step on the first node.
INTERACTIVE_STEP = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu08",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}


def test_a_task_of_a_step_over_two_nodes_is_a_node_of_a_run() -> None:
    assert ClusterMember.from_env(SECOND_TASK) == ClusterMember(2, 1, "gpu08")
    assert ClusterMember.from_env({**SECOND_TASK, "SLURM_NODEID": "0", "MASTER_PORT": "29501"}) == ClusterMember(
        2, 0, "gpu08", 29501
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        SALLOC_SHELL,
        INTERACTIVE_STEP,
        {**SECOND_TASK, "SLURM_PTY_PORT": "44505"},
        {**SECOND_TASK, "WORLD_SIZE": "1"},
        {**SECOND_TASK, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"},
    ],
    ids=["no SLURM", "script of sbatch", "salloc", "salloc with a step", "terminal", "said so", "tasks of one node"],
)
def test_what_is_not_started_on_every_node_is_a_run_on_one(environ: dict[str, str]) -> None:
    assert ClusterMember.from_env(environ) == ClusterMember()


@pytest.mark.parametrize("node", ["0", "1"])
def test_a_task_of_ray_symmetric_run_is_the_only_launcher(node: str) -> None:
    """It needs no address of node 0 either."""
    step = {key: value for key, value in SECOND_TASK.items() if key != "MASTER_ADDR"} | {"SLURM_NODEID": node}
    assert ClusterMember.from_env(step, "ray") == ClusterMember()
    assert ClusterMember.from_env({"WORLD_SIZE": "4", "RANK": "3", "MASTER_PORT": "7"}, "ray").master_port == 7


def test_what_the_user_set_comes_first() -> None:
    own = {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "[fd00::1]"}
    assert ClusterMember.from_env({**SECOND_TASK, **own}) == ClusterMember(3, 2, "fd00::1")
    assert ClusterMember.from_env({**SECOND_TASK, "MASTER_ADDR": "10.0.0.1"}) == ClusterMember(2, 1, "10.0.0.1")


@pytest.mark.parametrize("tasks", ["16", "3", ""])
def test_several_tasks_of_a_node_are_refused(tasks: str) -> None:
    with pytest.raises(ConfigError, match=r"--ntasks-per-node=1"):
        ClusterMember.from_env({**SECOND_TASK, "SLURM_STEP_NUM_TASKS": tasks})


def test_a_step_that_does_not_say_which_node_it_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_NODEID"):
        ClusterMember.from_env({key: value for key, value in SECOND_TASK.items() if key != "SLURM_NODEID"})


def test_a_step_without_an_address_or_a_token_is_told_of_the_script() -> None:
    with pytest.raises(ConfigError, match=r"scripts/slurm\.sbatch"):
        ClusterMember.from_env({key: value for key, value in SECOND_TASK.items() if key != "MASTER_ADDR"})
    with pytest.raises(ConfigError, match=r"scripts/slurm\.sbatch"):
        require_token(SECOND_TASK)
    with pytest.raises(ConfigError) as caught:
        require_token({"WORLD_SIZE": "2"})
    assert "srun" not in str(caught.value)
