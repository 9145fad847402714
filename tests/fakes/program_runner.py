"""Runs programs in the local sandbox, one a line of JSON, with secrets of its own near them. Needs no other package."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import socket
import sys
import tempfile

from pipelinerl.sandbox.programs import Limits, SandboxUnavailableError, check_sandbox, run_program

SECRET = "fire-in-the-vault"


def make_targets() -> dict[str, object]:
    """Make what programs must not reach, and return where it is."""
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    os.environ["A_SECRET"] = SECRET
    number, file = tempfile.mkstemp()
    os.write(number, SECRET.encode())
    os.chmod(file, 0o644)
    os.set_inheritable(number, True)
    listener = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(f"\0pipelinerl-test-{os.getpid()}")
    local.listen()
    add_key = 248 if os.uname().machine == "x86_64" else 217
    key = libc.syscall(add_key, b"user", b"pipelinerl-test", SECRET.encode(), len(SECRET), ctypes.c_int(-3))
    keep.extend([listener, local])
    return {
        "file": file,
        "port": listener.getsockname()[1],
        "unix": f"\0pipelinerl-test-{os.getpid()}",
        "key": key,
        "pid": os.getpid(),
    }


def answer(line: str, targets: dict[str, object]) -> dict[str, object]:
    request = json.loads(line)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = run_program(request["source"], json.dumps(targets), Limits(**request["limits"]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**dataclasses.asdict(run), "cpu_s": cpu_s}


def main() -> None:
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    targets = make_targets()
    print(json.dumps({"file": targets["file"]}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line, targets)), flush=True)


keep: list[object] = []
if __name__ == "__main__":
    main()
