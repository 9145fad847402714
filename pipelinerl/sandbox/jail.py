"""Builds the sandbox of one program, gives up all rights and runs the program. Started by `programs`, never imported.

Three processes of this file: the first enters new namespaces (of users too, unless it is root), the second is the init
process of the new process namespace and builds the file system, the third becomes the program. Each dies with the one
before it, and the first with its owner. A line on the descriptor `ready` says that the walls stand; without that line
nothing was run. Any error ends it: there is no weaker sandbox.

The program is a single process: only threads can be started. So the limits of a process are limits of all it does.
"""

import ctypes
import errno
import os
import platform
import re
import resource
import signal
import struct
import sys

CLONE_THREAD, CLONE_NEWUSER = 0x10000, 0x10000000
# Mount, UTS, IPC, process and network namespaces.
NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC = 1, 2, 4, 32, 4096, 8192, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
ST_RELATIME, KEPT_FLAGS = 4096, 1 | 2 | 4 | 8 | 1024 | 2048
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
F_SETPIPE_SZ = 1031

ROOT = "/proc"  # A folder that every machine has and the program does not need: its root is built over it.
KERNEL_FILE = "/proc/sys/kernel/core_pattern"  # It belongs to the kernel's user 0, whatever that is called here.
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
INODES = 4096
# Users that root becomes: one of its own for each program, or where only few users are mapped, one that nobody has.
FIRST_USER, SPARE_USER = 0x70000000, 65533

# System calls that are refused, with their numbers for both kinds of processors.
REFUSED_CALLS: "dict[str, tuple[int | None, int | None]]" = {
    # processes and namespaces
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # keyrings
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that no limit counts
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # doors out of a network namespace (vsock) or into rarely used parts of the kernel
    "socket": (41, 198),
    "perf_event_open": (298, 241),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "modify_ldt": (154, None),
    # the kernel's log
    "syslog": (103, 116),
    # what all users of a machine share
    "io_setup": (206, 0),
    "sync": (162, 81),
    "syncfs": (306, 267),
}
# AUDIT_ARCH, and the calls that are refused with some arguments only.
MACHINES = {
    "x86_64": {"column": 0, "arch": 0xC000003E, "clone": 56, "fcntl": 72},
    "aarch64": {"column": 1, "arch": 0xC00000B7, "clone": 220, "fcntl": 25},
}
CLONE3 = 435  # on both; without it, libc uses clone, whose flags a filter can read
FIRST_X32_CALL = 0x40000000

LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: "bytes | None", flags: int, options: "bytes | None" = None) -> None:
    result = LIBC.mount(os.fsencode(source), os.fsencode(target), kind, ctypes.c_ulong(flags), options)
    check(result, f"mount {source} on {target}")


def die_with_parent() -> None:
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")


def enter_namespaces(is_root: bool) -> None:
    """Leave the namespaces of this machine for new ones; who is not root gets their rights from a new user namespace.

    Users of a namespace are users of the kernel under other names. The kernel's user 0 owns the settings of the machine
    also without any rights, so whoever is that user and cannot become another one must not run a program.
    """
    user, group = os.geteuid(), os.getegid()
    if is_root:
        check(LIBC.unshare(NAMESPACES), "unshare as root")
        return
    if user == os.stat(KERNEL_FILE).st_uid:
        raise PermissionError("this user is the kernel's user 0 under another name")
    check(LIBC.unshare(NAMESPACES | CLONE_NEWUSER), "unshare of the user namespace")
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def build_root(python_prefix: str, size_bytes: int) -> None:
    """Make a file system of the system's libraries, Python, and an empty /tmp, and move into it. It has no /proc."""
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    folders = [*SYSTEM_FOLDERS, *([] if f"{python_prefix}/".startswith("/usr/") else [python_prefix])]
    with open("/proc/self/mountinfo", errors="surrogateescape") as mounts:
        options = f"size={size_bytes},nr_inodes={INODES},mode=0755"
        mount("tmpfs", ROOT, b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
        for path in folders:
            if os.path.islink(path):
                os.symlink(os.readlink(path), ROOT + path)
            elif os.path.isdir(path):
                os.makedirs(ROOT + path, exist_ok=True)
                mount(path, ROOT + path, None, MS_BIND | MS_REC)
        for name in ("/tmp", "/dev"):
            os.makedirs(ROOT + name, exist_ok=True)
        for device in DEVICES:
            os.close(os.open(ROOT + device, os.O_CREAT, 0o666))
            mount(device, ROOT + device, None, MS_BIND)
        for line in mounts:  # also what is mounted inside of these folders
            point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split()[4])
            if point.startswith(ROOT + "/") and os.path.lexists(point):
                make_read_only(point)
    os.chmod(ROOT + "/tmp", 0o777)
    os.chdir(ROOT)
    mount(ROOT, "/", None, MS_MOVE)
    os.chroot(".")
    os.chdir("/tmp")


def make_read_only(point: str) -> None:
    given = os.statvfs(point).f_flag  # a user namespace may not take restrictions away
    flags = (given & KEPT_FLAGS) | (MS_RELATIME if given & ST_RELATIME else 0)
    mount("none", point, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | flags)


def set_limits(cpu_s: int, memory_bytes: int, file_bytes: int, threads: int) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, threads),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 1),  # with 0, the kernel would still start a program of the machine that takes dumps
    ):
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def become(user: int, kernel_user: int) -> None:
    """Become `user`, or the spare one where that is none here."""
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise PermissionError("root may not change the user") from error
        os.setresgid(SPARE_USER, SPARE_USER, SPARE_USER)
        os.setresuid(SPARE_USER, SPARE_USER, SPARE_USER)
    if os.getuid() == kernel_user:
        raise PermissionError("no user is mapped here but the kernel's user 0")


def drop_capabilities() -> None:
    """Give up every capability for good, also across exec."""
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel has no more of them
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def filter_of(machine: "dict[str, int]") -> bytes:
    """Return the seccomp filter as instructions of classic BPF: code, jump if true, jump if false, value."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x80000000
    number, arch, first_argument, second_argument = 0, 4, 16, 24
    steps = [
        (load, 0, 0, arch),
        (equal, 1, 0, machine["arch"]),
        (give, 0, 0, kill),
        (load, 0, 0, number),
        (at_least, 0, 1, FIRST_X32_CALL),
        (give, 0, 0, refuse),
        (equal, 0, 1, CLONE3),
        (give, 0, 0, 0x50000 | errno.ENOSYS),
    ]
    for numbers in REFUSED_CALLS.values():
        call = numbers[machine["column"]]
        steps += [] if call is None else [(equal, 0, 1, call), (give, 0, 0, refuse)]
    steps += [  # nothing but a thread
        (equal, 0, 4, machine["clone"]),
        (load, 0, 0, first_argument),
        (any_bit, 1, 0, CLONE_THREAD),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    steps += [  # no larger pipes
        (equal, 0, 3, machine["fcntl"]),
        (load, 0, 0, second_argument),
        (equal, 0, 1, F_SETPIPE_SZ),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def filter_system_calls() -> None:
    instructions = filter_of(MACHINES[platform.machine()])
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions) // 8, ctypes.addressof(buffer)))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0), "PR_SET_SECCOMP")


def start_program(python: str, ready: int, is_root: bool, user: int, kernel_user: int, limits: "list[int]") -> None:
    """In the third process: give up all rights and become the program."""
    os.setsid()  # a signal to a process group reaches also those outside of the namespace
    set_limits(*limits)
    drop_capabilities()
    if is_root:
        become(user, kernel_user)
    filter_system_calls()
    os.write(ready, b"ready\n")
    os.close(ready)
    os.execve(python, [python, "-I", "-B", "program.py"], {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})


def wait_for(child: int, cpu_s: float) -> None:
    """End as the child does. What was killed at its limit of processor time ends as with SIGXCPU.

    The kernel enforces the limit by a clock that counts in ticks, for each thread: it may be ahead of the usage that it
    reports.
    """
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime > 0.75 * cpu_s:
        code = -signal.SIGXCPU
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    python, prefix = sys.argv[1:3]
    owner, source, ready, *limits = (int(word) for word in sys.argv[3:])
    cpu_s, _, file_bytes, _ = limits
    is_root = os.geteuid() == 0
    user, kernel_user = FIRST_USER + os.getpid(), os.stat(KERNEL_FILE).st_uid
    enter_namespaces(is_root)
    die_with_parent()  # new rights would reset it
    if os.getppid() != owner:
        sys.exit(1)
    alive_read, alive_write = os.pipe()
    init = os.fork()
    if init != 0:
        os.close(ready)
        wait_for(init, float("inf"))
    os.close(alive_write)
    die_with_parent()
    os.set_blocking(alive_read, False)
    try:
        os.read(alive_read, 1)
        sys.exit(1)  # the first process died before
    except BlockingIOError:
        pass
    build_root(prefix, file_bytes)
    with open(source, "rb") as program, open("program.py", "wb") as copy:
        copy.write(program.read())
    child = os.fork()
    if child == 0:
        start_program(python, ready, is_root, user, kernel_user, limits)
    os.close(ready)
    wait_for(child, cpu_s)


main()
