"""CUDA's Multi-Process Service (MPS) for the GPUs that several processes of a run share at the same time.

Without it, processes time-slice the GPU, each using all of it in turn however little it needs, such as servers of a
small model next to a trainer. With it their kernels run concurrently. The run starts its own daemon, for its processes
on this node only, which ends with the launcher, however that ends. No GPU setting is changed.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.run.start import socket_parent
from pipelinerl.rundir.durable import ScratchFolder
from pipelinerl.world import Job

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE_KEY, LOG_KEY = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
#: The default of CUDA_MPS_PIPE_DIRECTORY.
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
_START_S, _END_S = 20.0, 15.0
#: Starts the daemon and its server, prints the server's pid and a dot, and ends both when its standard input does.
_GUARD = f"""
{CONTROL} -d </dev/null || exit 1
echo "start_server -uid $(id -u)" | {CONTROL}
echo get_server_list | {CONTROL}
echo .
read -r _
echo "quit -t 5" | {CONTROL} >/dev/null
"""


def shared_gpus(config: RunConfig, jobs: Sequence[Job]) -> list[str]:
    """The GPUs on which several jobs of a node compute at the same time. MIG slices are left out: each would need its
    own daemon."""
    if config.world.placement == "colocated":  # while ranks train the servers sleep
        return []
    kinds = ("actor_llm", "preprocessor_llm", "finetune")
    users = Counter(gpu for job in jobs if job.kind in kinds for gpu in job.gpus)
    return [gpu for gpu, count in users.items() if count > 1 and not gpu.startswith("MIG-")]


@contextmanager
def shared_by_mps(config: RunConfig, jobs: Sequence[Job], environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """`environ` with the address of an MPS daemon that lives as long as this context.

    Unchanged if no GPU is shared, `world.mps` is off, the user runs a daemon, or none can be started (logged).
    """
    gpus = shared_gpus(config, jobs)
    if not gpus or not config.world.mps or PIPE_KEY in environ or (DEFAULT_PIPES / "control").exists():
        yield environ
        return
    try:
        scratch = ScratchFolder("mps", socket_parent(environ))
    except OSError as error:
        logger.warning("GPU %s: processes on it take turns, without MPS: %s", ", ".join(gpus), error)
        yield environ
        return
    with scratch as folder:
        address = {PIPE_KEY: str(folder), LOG_KEY: str(folder)}
        # The daemon renumbers the GPUs that it sees, but jobs use the launcher's numbers: it must see all.
        own = {key: value for key, value in environ.items() if key != "CUDA_VISIBLE_DEVICES"} | address
        guard, reason = _start(own)
        try:
            if reason is None:
                logger.info("GPU %s: its processes run concurrently, under MPS", ", ".join(gpus))
            else:
                logger.warning("GPU %s: processes on it take turns, without MPS: %s", ", ".join(gpus), reason)
            yield environ if reason is not None else {**environ, **address}
        finally:
            if guard is not None:
                _end(guard)


def _start(environ: Mapping[str, str]) -> tuple[subprocess.Popen[bytes] | None, str | None]:
    """Return the process that holds the daemon, and why clients cannot use it, if so."""
    if shutil.which(CONTROL, path=environ.get("PATH")) is None:
        return None, f"{CONTROL} is not installed"
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    try:
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD], env=dict(environ), stdin=pipe, stdout=pipe, stderr=both, start_new_session=True
        )
    except OSError as error:
        return None, str(error)
    assert guard.stdout is not None
    said, deadline = b"", time.monotonic() + _START_S
    while not said.endswith(b"\n.\n") and select.select([guard.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
        if not (block := os.read(guard.stdout.fileno(), 4096)):
            break
        said += block
    words = said.decode("utf-8", errors="replace").split("\n")
    if said.endswith(b"\n.\n") and any(word.strip().isdecimal() for word in words):
        return guard, None
    lines = [word.strip() for word in words if word.strip(" .")]
    return guard, lines[-1] if lines else "its server did not start"


def _end(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None and guard.stdout is not None
    with suppress(OSError):
        guard.stdin.close()
    try:
        guard.wait(_END_S)
    except subprocess.TimeoutExpired:
        logger.warning("the MPS daemon did not exit within %.0f s", _END_S)
        guard.kill()
        guard.wait()
    guard.stdout.close()
