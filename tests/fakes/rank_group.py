"""Several trainer ranks of a test as processes. They meet through a file, so no port is chosen in advance."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

MEETING_KEY = "TEST_MEETING_FILE"


def run_ranks(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    world_size: int = 2,
    limit_s: float = 800,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Run `script` on every rank to its end, with logs in `folder`.

    Any other exit than 0 fails at once with the logs. A rank that is not done in time writes the stack of its threads
    into its log. `environments` adds variables rank by rank.
    """
    processes = []
    for rank in range(world_size):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, MEETING_KEY: folder / "meeting"}
        env = {
            **os.environ,
            **{key: str(value) for key, value in group.items()},
            **({"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.getenv("PYTHONPATH")])]),
            **(environments[rank] if environments else {}),
        }
        with log_of(folder, rank).open("w") as log:
            command = [sys.executable, str(script), *arguments]
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    with ThreadPoolExecutor(world_size) as pool:
        ends = [pool.submit(_succeed, process, limit_s) for process in processes]
        wait(ends, return_when=FIRST_EXCEPTION)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
    logs = "\n".join(f"rank {rank}: {log_of(folder, rank).read_text()[-6000:]}" for rank in range(world_size))
    assert [process.returncode for process in processes] == [0] * world_size, logs


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"log_{rank}.txt"


def _succeed(process: subprocess.Popen[bytes], limit_s: float) -> None:
    if process.wait(limit_s) != 0:
        raise ChildProcessError(process.args)
