"""L9: when the launcher's end of the pipe closes, the process and its stubborn children end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from pipelinerl.role import DEATH_FD_KEY, end_with_launcher

# The process has a child that ignores SIGTERM, as a server with worker processes may.
ROLE = """
import os, signal, subprocess, sys, threading
from pipelinerl.role import end_with_launcher
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print(1, flush=True); time.sleep(100)"], stdout=subprocess.PIPE)
child.stdout.readline()
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if sys.argv[2] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ["PIPELINERL_DEATH_FD"] = sys.argv[1]
end_with_launcher(float(sys.argv[3]))
print(child.pid, flush=True)
threading.Event().wait(100)
"""


# The grace has to do for a handler that ends the interpreter, on any machine; nobody else uses it.
@pytest.mark.parametrize(
    ("on_sigterm", "grace_s", "code"), [("default", 0.5, -15), ("handler", 5, 7), ("ignore", 0.5, -9)]
)
def test_the_whole_group_ends_when_the_pipe_closes(on_sigterm: str, grace_s: float, code: int) -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ROLE, str(read_end), on_sigterm, str(grace_s)],
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read_end)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    os.write(write_end, b"bytes are no death")
    time.sleep(0.1)
    assert process.poll() is None
    os.close(write_end)
    assert process.wait(60) == code
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    process.stdout.close()


def test_a_descriptor_that_is_not_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    monkeypatch.setenv(DEATH_FD_KEY, str(read_end))
    with pytest.raises(OSError):
        end_with_launcher()
