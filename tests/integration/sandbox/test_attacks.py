"""X8: programs that attack the local sandbox: none reads a secret, writes outside, exceeds a limit, survives its owner.

Each prints ESCAPED if it gets what it must not have; the word beside it shows that it has tried, and how it failed.
Run as root and as another user; where neither is sound, nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from fakes.program_runner import SECRET

REPOSITORY = Path(__file__).parents[3]
RUNNER = "tests/fakes/program_runner.py"
USER = "54321"
MIB = 1 << 20
MEMORY = 128 * MIB
LIMITS: dict[str, float] = {"cpu_s": 20, "wall_s": 60.0, "memory_bytes": MEMORY}

PRELUDE = """
import ctypes, fcntl, json, mmap, os, platform, resource, signal, socket, sys, threading, time
C = ctypes.CDLL(None, use_errno=True)
C.syscall.restype = ctypes.c_long
G = json.loads(input())
IS_X86 = platform.machine() == "x86_64"
def said(result):
    print("ESCAPED" if result != -1 else f"errno {ctypes.get_errno()}.")
def call(x86, arm, *arguments):
    number = x86 if IS_X86 else arm
    if number is None:
        return print("errno 1.")
    said(C.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))
def held(is_held):
    print("held" if is_held else "ESCAPED")
"""

NOT_THERE, READ_ONLY, FORBIDDEN = "FileNotFoundError", "Read-only", "PermissionError"
REFUSED, HELD = "errno 1.", "held"

SECRETS = {
    "environment": ("held('A_SECRET' not in os.environ)", HELD),
    "file of the owner": ("open(G['file'])", NOT_THERE),
    "users": ("open('/etc/passwd')", NOT_THERE),
    "this repository": (f"open({__file__!r})", NOT_THERE),
    "environment of init": ("open('/proc/1/environ')", NOT_THERE),
    "mounts": ("open('/proc/self/mountinfo')", NOT_THERE),
    "hardware": ("os.listdir('/sys')", NOT_THERE),
    "devices": ("held(sorted(os.listdir('/dev')) == ['null', 'urandom', 'zero'])", HELD),
    "root folder": (
        "known = 'usr lib lib64 bin dev tmp'.split() + [sys.base_prefix.split('/')[1]]\n"
        "held(set(os.listdir('/../..')) <= set(known))",
        HELD,
    ),
    "inherited descriptors": (
        "opened = []\nfor fd in range(64):\n    try: os.fstat(fd); opened.append(fd)\n"
        "    except OSError: pass\nheld(opened == [0, 1, 2])",
        HELD,
    ),
    "key of the session": ("call(250, 219, 11, -3, 0, 0)", REFUSED),
    "key by its number": ("b = ctypes.create_string_buffer(64)\ncall(250, 219, 11, G['key'], b, 64)", REFUSED),
    "search for a key": ("call(249, 218, b'user', b'pipelinerl-test', 0, -3)", REFUSED),
    "new key": ("call(248, 217, b'user', b'x', b'y', 1, -3)", REFUSED),
    "memory of init": ("call(310, 270, 1, 0, 0, 0, 0, 0)", REFUSED),
    "ptrace of init": ("call(101, 117, 16, 1, 0, 0)", REFUSED),
    "pidfd of init": ("call(434, 434, 1, 0)", REFUSED),
    "descriptor of init": ("call(438, 438, 0, 0, 0)", REFUSED),
    "log of the kernel": ("b = ctypes.create_string_buffer(64)\ncall(103, 116, 3, b, 64)", REFUSED),
    "server on loopback": ("socket.create_connection(('127.0.0.1', G['port']), 1)", FORBIDDEN),
    "abstract socket": ("socket.socket(socket.AF_UNIX).connect(G['unix'])", FORBIDDEN),
    "host of a virtual machine": ("socket.socket(40, socket.SOCK_STREAM)", FORBIDDEN),
    "netlink": ("socket.socket(16, socket.SOCK_RAW)", FORBIDDEN),
    "file by handle": ("call(304, 265, 0, 0, 0)", REFUSED),
    "call of another ABI": ("call(0x40000000 | 39, None)", REFUSED),
    "call of 32 bits": (
        "m = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3') if IS_X86 else b'\\0' * 8)\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))(), 'ESCAPED')",
        "crashed",
    ),
}

RIGHTS = {
    "settings of the kernel": ("open('/proc/sys/kernel/core_pattern', 'w')", NOT_THERE),
    "system folder": ("open('/usr/owned', 'w')", READ_ONLY),
    "mount in a system folder": ("open('/usr/share/owned', 'w')", READ_ONLY),
    "Python": ("open(sys.base_prefix + '/owned', 'w')", READ_ONLY),
    "device": ("os.chmod('/dev/null', 0o777)", READ_ONLY),
    "time of a device": ("os.utime('/dev/null')", READ_ONLY),
    "write to stdin": ("os.write(0, b'x')", "Bad file descriptor"),
    "length of stdin": ("os.ftruncate(0, 1 << 20)", "Invalid argument"),
    "remount": ("said(C.mount(None, b'/usr', None, 32 | 4096, None))", REFUSED),
    "mount of proc": ("said(C.mount(b'proc', b'/tmp', b'proc', 0, None))", REFUSED),
    "unmount": ("said(C.umount2(b'/usr', 2))", REFUSED),
    "chroot": ("os.chroot('/tmp')", FORBIDDEN),
    "block device": ("os.mknod('/tmp/m', 0o60600, os.makedev(254, 0))", FORBIDDEN),
    "host name": ("said(C.sethostname(b'x', 1))", REFUSED),
    "user namespace": ("said(C.unshare(0x10000000))", REFUSED),
    "mount namespace": ("said(C.unshare(0x20000))", REFUSED),
    "namespace of another": ("said(C.setns(0, 0))", REFUSED),
    "process in a user namespace": ("call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)", REFUSED),
    "another user": ("os.setuid(1)", "Error"),
    "other groups": ("os.setgroups([1])", FORBIDDEN),
    "capabilities": (
        "held(all(C.prctl(23, c, 0, 0, 0) != 1 for c in range(64)) and C.prctl(39, 0, 0, 0, 0) == 1)\n"
        "head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "held(C.capget(head, data) == 0 and not any(data))",
        "held\nheld",
    ),
    "death of the owner": ("os.kill(G['pid'], 9)", "ProcessLookupError"),
    "death of all": (
        "for pid in (1, -1):\n    try: os.kill(pid, 9 if pid == 1 else 10)\n    except OSError: pass\n"
        "time.sleep(0.2)\nprint('held')",
        HELD,
    ),
    "death of its group": ("os.kill(0, 9)", "crashed"),
    "priority of its group": (
        "os.setpriority(os.PRIO_PGRP, 0, 19)\nheld(os.getpgid(0) == os.getpid())",
        HELD,
    ),
    "priority": ("os.setpriority(0, 0, -20)", FORBIDDEN),
    "real time": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", FORBIDDEN),
    "bpf": ("call(321, 280, 0, 0, 0)", REFUSED),
    "perf": ("call(298, 241, 0, 0, -1, -1, 0)", REFUSED),
    "io_uring": ("call(425, 425, 8, 0)", REFUSED),
    "asynchronous reads": ("b = ctypes.c_ulong(0)\ncall(206, 0, 1000, ctypes.byref(b))", REFUSED),
    "userfaultfd": ("call(323, 282, 0)", REFUSED),
}

PROCESSES = {
    "fork": ("os.fork(); print('ESCAPED')", FORBIDDEN),
    "vfork": ("call(58, None)", REFUSED),
    "clone": ("call(56, 220, 17, 0, 0, 0, 0)", REFUSED),
    "clone with memory": ("call(56, 220, 0x4100 | 17, 0, 0, 0, 0)", REFUSED),
    "clone3": ("call(435, 435, 0, 0)", "errno 38."),
    "program": ("import subprocess; subprocess.run(['true']); print('ESCAPED')", FORBIDDEN),
    "spawn": ("os.posix_spawn('/bin/true', ['true'], {}); print('ESCAPED')", FORBIDDEN),
    "daemon": ("os.forkpty(); print('ESCAPED')", "Error"),
    "higher limits": (
        "for kind in ('AS', 'CPU', 'FSIZE', 'NPROC', 'NOFILE', 'CORE', 'MSGQUEUE', 'SIGPENDING'):\n"
        "    kind = getattr(resource, f'RLIMIT_{kind}', 11)\n"
        "    try: resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2); print('ESCAPED')\n"
        "    except ValueError: pass\nprint('held')",
        HELD,
    ),
    "threads": (
        "n = 0\nthreading.stack_size(1 << 15)\n"
        "try:\n    while n < 200: threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nheld(0 < n < 65)\nsys.stdout.flush()\nos._exit(0)",
        HELD,
    ),
    "shared memory": ("said(C.shmget(0, 1 << 20, 0o1600))", REFUSED),
    "message queue": ("said(C.msgget(0, 0o1600))", REFUSED),
    "semaphores": ("said(C.semget(0, 32000, 0o1600))", REFUSED),
    "POSIX queue": ("call(240, 180, b'q', 0o102, 0o600, 0)", REFUSED),
    "memory as a file": ("os.memfd_create('x')", FORBIDDEN),
    "watches": ("said(C.inotify_init1(0))", REFUSED),
    "large pipe": ("r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)", FORBIDDEN),
    "large file": ("open('f', 'wb').write(b'x' * (20 << 20)); print('ESCAPED')", "Error"),
    "many files": ("for n in range(10_000): os.mkdir(str(n))", "No space left"),
}

HOARD = """
kept, total = [], 0
def hoard(make, size):
    global total
    try:
        while True:
            kept.append(make(size)); total += size
    except (MemoryError, OSError, ValueError):
        pass
def shared(size):
    m = mmap.mmap(-1, size); m.write(b"x" * size); return m
def file(size):
    with open(str(len(kept)), "wb") as f: f.write(b"x" * size)
def filled(descriptors, size):
    for d in descriptors: os.set_blocking(d, False)
    try:
        while True: fill(descriptors, os.write(descriptors[1], b"x" * 4096))
    except BlockingIOError: pass
def fill(_, n):
    global total
    total += n
def pair(size):
    pair = socket.socketpair(); kept.append(pair)
    filled([pair[1].fileno(), pair[0].fileno()], size); filled([pair[0].fileno(), pair[1].fileno()], size)
def pipe(size): filled(os.pipe(), size)
ways = WAYS
for make, size in ways: hoard(make, size)
print("total", total)
"""

TOTALS = {
    "arrays": "[(b'x'.__mul__, 1 << 20), (b'x'.__mul__, 1 << 12)]",
    "shared pages": "[(shared, 1 << 20)]",
    "files": "[(file, 1 << 18)]",
    "pipes": "[(pipe, 0)]",
    "sockets": "[(pair, 0)]",
    "everything": "[(file, 1 << 18), (pipe, 0), (b'x'.__mul__, 1 << 20), (b'x'.__mul__, 1 << 12)]",
}

SPIN = "while True: pass"
TIMES = {
    "spins": (SPIN, "time_limit"),
    "ignores the signal": (f"signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n{SPIN}", "time_limit"),
    "spins on all processors": (
        "import hashlib\ndef spin():\n    while True: hashlib.sha256(b'x' * (8 << 20))\n"
        "for _ in range(4): threading.Thread(target=spin).start()",
        "time_limit",
    ),
    "sleeps": ("time.sleep(600)", "time_limit"),
    "closes its output": ("os.close(1); os.close(2); time.sleep(600)", "time_limit"),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)", "time_limit"),
    "prints": ("while True: print('x' * 1000)", "output_limit"),
    "prints errors": ("while True: print('x' * 1000, file=sys.stderr)", "output_limit"),
}


# Each is like one that is quick.
SLOW = {
    *(
        "users",
        "mounts",
        "descriptor of init",
        "time of a device",
        "unmount",
        "mount namespace",
        "bpf",
        "perf",
        "io_uring",
    ),
    *("userfaultfd", "clone with memory", "spawn", "message queue", "semaphores"),
    *TOTALS.keys() - {"everything"},
    *TIMES.keys() - {"spins on all processors", "prints"},
}


def parameters(cases: dict[str, Any]) -> list[Any]:
    """Return the cases with their names; some run in the whole suite only."""
    marks = {name: [pytest.mark.slow] if name in SLOW else [] for name in cases}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=marks[name])
        for name, case in cases.items()
    ]


class Result(NamedTuple):
    ending: str
    stdout: str
    stderr: str
    cpu_s: float


class Owner:
    """A process that runs programs, started by `argv` before the Python command."""

    def __init__(self, argv: list[str], python: str = sys.executable, code: Path = REPOSITORY) -> None:
        self.process = subprocess.Popen(
            [*argv, python, str(code / RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(code)},
        )
        self.greeting = self._read()

    def ask(self, source: str, **limits: float) -> Result:
        self.send(source, **limits)
        return Result(**self._read())

    def send(self, source: str, **limits: float) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"source": PRELUDE + source, "limits": {**LIMITS, **limits}}), file=self.process.stdin)
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
        Path(self.greeting.get("file", "/none")).unlink(missing_ok=True)


def as_user() -> tuple[list[str], str, Path]:
    """Return the words before a command, Python and the code for another user: root's own may be closed to others."""
    if os.geteuid() != 0:
        return [], sys.executable, REPOSITORY
    folder = Path("/home")  # in a mount namespace of its own, so that nothing is left
    script = (
        f"mount -t tmpfs -o mode=755 none {folder} && mkdir {folder}/python {folder}/code && "
        f"mount --bind {sys.base_prefix} {folder}/python && mount --bind {REPOSITORY} {folder}/code && "
        f"mount -t tmpfs -o mode=777 none /usr/share && "
        f'exec setpriv --reuid {USER} --regid {USER} --clear-groups "$@"'
    )
    python = folder / "python" / Path(os.path.realpath(sys.executable)).relative_to(os.path.realpath(sys.base_prefix))
    return ["unshare", "--mount", "sh", "-c", script, "sh"], str(python), folder / "code"


def start(mode: str) -> Owner:
    if os.geteuid() != 0 and mode == "root":
        pytest.skip("the tests do not run as root")
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("setpriv or unshare (util-linux) is missing")
    owner = Owner([]) if mode == "root" else Owner(*as_user())
    if "refused" in owner.greeting:
        owner.close()
        pytest.skip(owner.greeting["refused"][:300])
    return owner


@pytest.fixture(scope="module", params=["root", "user"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    made = start(request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("source", "word"), parameters({**SECRETS, **RIGHTS, **PROCESSES}))
def test_it_is_contained(owner: Owner, source: str, word: str) -> None:
    done = owner.ask(source)
    shown = f"{done.ending}\n{done.stdout}\n{done.stderr}"
    assert word in shown and "ESCAPED" not in done.stdout and SECRET not in shown, shown


@pytest.mark.parametrize("ways", parameters(TOTALS))
def test_its_memory_is_limited_in_total(owner: Owner, ways: str) -> None:
    done = owner.ask(HOARD.replace("WAYS", ways))
    assert done.ending == "finished" and 0 < int(done.stdout.split()[1]) <= 1.2 * MEMORY, done


@pytest.mark.parametrize(("source", "ending"), parameters(TIMES))
def test_its_time_and_output_are_limited_in_total(owner: Owner, source: str, ending: str) -> None:
    done = owner.ask(source, cpu_s=2, wall_s=8 if "spin" in source else 2, memory_bytes=4 * MEMORY)
    assert done.ending == ending and done.cpu_s < 1.2 * 2, done


@pytest.mark.parametrize("mode", ["root", "user"])
@pytest.mark.parametrize("source", [SPIN, "time.sleep(600)", "os.close(1); os.close(2); time.sleep(600)"])
def test_it_dies_with_its_owner(mode: str, source: str) -> None:
    owner = start(mode)
    owner.send(f"for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n{source}")
    family = kill_owner_of_a_program(owner.process.pid)
    owner.close()
    assert len(family) == 3 and has_gone(family)


GRADING = """
import asyncio
from pipelinerl.sandbox.pool import GraderPool
from pipelinerl.sandbox.protocol import GradeRequest
text = "```python\\nwhile True: pass\\n```"
problem = {"tests": [{"input": "", "output": ""}] * 100}
async def main():
    async with GraderPool(1, 600, 2 << 30) as pool:
        await pool.grade(GradeRequest("pipelinerl.domains.coding.verify_coding", text, problem, {"partial": True}))
asyncio.run(main())
"""


@pytest.mark.slow
def test_it_dies_with_the_owner_of_its_grader() -> None:
    start("root" if os.geteuid() == 0 else "user").close()  # skips where nothing runs
    with subprocess.Popen([sys.executable, "-c", GRADING], cwd=REPOSITORY) as pool:
        family = kill_owner_of_a_program(pool.pid)
    assert len(family) == 4 and has_gone(family)


def kill_owner_of_a_program(pid: int) -> list[psutil.Process]:
    """Kill a process that runs a program, and return what descended from it; the last is the program."""
    process, family = psutil.Process(pid), list[psutil.Process]()
    deadline = time.monotonic() + 60
    is_running = is_safe = False
    while not is_running:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        with contextlib.suppress(psutil.Error):  # others, as that of the check, end meanwhile
            family = process.children(recursive=True)
            is_running = any("program.py" in each.cmdline() for each in family)
            is_safe = is_running and all(user != 0 for user in family[-1].uids())
    process.kill()
    assert is_safe
    return family


def has_gone(family: list[psutil.Process]) -> bool:
    """Return whether these processes end within five seconds."""
    deadline = time.monotonic() + 5
    while left := [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return not left


def test_python_may_lie_behind_a_link(tmp_path: Path) -> None:
    start("root" if os.geteuid() == 0 else "user").close()  # skips where nothing runs
    (tmp_path / "python").symlink_to(sys.base_prefix)
    executable = Path(os.path.realpath(sys.executable)).relative_to(os.path.realpath(sys.base_prefix))
    owner = Owner([], str(tmp_path / "python" / executable))
    done = owner.ask("print(6 * 7)")
    owner.close()
    assert done.stdout == "42\n"


ADDRESS_SPACE = "print(resource.getrlimit(resource.RLIMIT_AS)[1] >> 20)"


def test_lower_limits_of_its_owner_stay() -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit (util-linux) is missing")
    owner = Owner(["prlimit", f"--as={300 * MIB}"])
    limit = None if "refused" in owner.greeting else owner.ask(ADDRESS_SPACE, memory_bytes=512 * MIB)
    owner.close()
    if limit is None:
        pytest.skip(owner.greeting["refused"][:300])
    assert limit.stdout == "300\n"


WITHOUT = ["setpriv", "--bounding-set"]
NO_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
REFUSALS = {
    "root that may not change the user": ([*WITHOUT, "-setuid"], "may not change the user"),
    "root that may not change groups": ([*WITHOUT, "-setgid"], "may not change the user"),
    "root that may not make namespaces": ([*WITHOUT, "-sys_admin"], "unshare as root"),
    "root under another name": (["unshare", "--user", "--map-user=1000", "--map-group=1000"], "kernel's user 0"),
    "user without namespaces": (
        ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", NO_NAMESPACES, "sh"],
        "unshare of the user namespace",
    ),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take these rights away")
@pytest.mark.parametrize("mode", REFUSALS)
def test_where_no_sandbox_is_sound_nothing_runs(mode: str) -> None:
    argv, reason = REFUSALS[mode]
    if mode.startswith("root"):
        owner = Owner(argv)
    else:
        before, python, code = as_user()
        owner = Owner([*before, *argv], python, code)
    owner.close()
    assert reason in owner.greeting["refused"].partition(". ")[0]
