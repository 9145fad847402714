"""What `scripts/slurm.sbatch` makes of the launcher's end, with programs that stand for SLURM's.

The same under a real SLURM is in `tests/integration/test_slurm.py`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
SRUN = """#!/usr/bin/env bash
for word; do
  [[ $word != *"$RAY_AUTH_TOKEN"* ]] || exit 99
  echo "srun: $word"
done
[[ $MASTER_ADDR == gpu08 ]] || exit 98
exit "$SRUN_CODE"
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* != "show hostnames gpu[08-09]" ]] || { printf 'gpu08\\ngpu09\\n'; exit 0; }
echo "scontrol: $*"
exit "$SCONTROL_CODE"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run_job(programs: Path, *words: str, srun_code: int = 0, **environ: str) -> tuple[int, list[str]]:
    """The job's exit code, and what the programs got."""
    job = {
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[08-09]",
        "SRUN_CODE": str(srun_code),
        "SCONTROL_CODE": "0",
    }
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PIPELINERL"))}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words],
        env={**own, **job, "PATH": path} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("srun_code", "environ", "code", "is_requeued"),
    [
        (0, {}, 0, False),
        (1, {}, 1, False),
        (130, {}, 130, False),
        (143, {}, 0, True),
        (143, {"SCONTROL_CODE": "1"}, 143, True),
        (143, {"SLURM_RESTART_COUNT": "99"}, 0, True),
        (143, {"SLURM_RESTART_COUNT": "100"}, 143, False),
        (143, {"PIPELINERL_MAX_REQUEUES": "0"}, 143, False),
    ],
)
def test_only_sigterm_puts_a_job_back(
    programs: Path, srun_code: int, environ: dict[str, str], code: int, is_requeued: bool
) -> None:
    found, said = run_job(programs, "output_dir=a b", srun_code=srun_code, **environ)
    assert (found, "scontrol: requeue 7" in said) == (code, is_requeued)
    assert "srun: output_dir=a b" in said


def test_a_job_from_the_queue_continues_what_its_first_start_began(programs: Path) -> None:
    """Each start of the same command would move the run before it aside."""
    _, first = run_job(programs, "force_restart=true")
    _, second = run_job(programs, "force_restart=true", SLURM_RESTART_COUNT="1")
    assert first[-2:] == ["srun: supervise.shutdown_grace_s=240", "srun: force_restart=true"]
    # Of values of the same key the last one counts.
    assert second == [*first, "srun: force_restart=false"]
