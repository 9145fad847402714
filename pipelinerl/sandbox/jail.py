"""Runs inside the sandbox, before the model's program: builds an empty file system, sets limits, drops all rights.

Started by `sandbox` through `unshare`, as the first process of new mount, network, process and IPC namespaces (and a
new user namespace unless the caller is root), with nothing but the standard library. Writes a line to the descriptor
`ready` once the walls stand; without that line nothing was run. Waits for the program; its end ends all that it
started. Never imported.
"""

import ctypes
import os
import resource
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC = 1, 2, 4, 32, 4096, 8192, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
ST_RELATIME, KEPT_FLAGS = 4096, 1 | 2 | 4 | 8 | 1024 | 2048
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
NOBODY = 65534
CLONE_NEWUSER = 0x10000000
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
DEVICES = ("null", "zero", "urandom")
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: "str | None", flags: int, options: str = "") -> None:
    result = LIBC.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode() if options else None
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def bind_read_only(source: str, root: str) -> None:
    target = root + source
    os.makedirs(target, exist_ok=True)
    mount(source, target, None, MS_BIND | MS_REC)
    given = os.statvfs(target).f_flag  # a user namespace may not take restrictions away
    flags = (given & KEPT_FLAGS) | (MS_RELATIME if given & ST_RELATIME else 0)
    mount(source, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | flags)


def build_root(root: str, python_prefix: str, size_bytes: int) -> None:
    """Make a file system of the system's libraries, Python, and an empty /tmp, and move into it."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_bytes},mode=0755")
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.isdir(folder):
            bind_read_only(folder, root)
    if not python_prefix.startswith("/usr"):
        bind_read_only(python_prefix, root)
    for folder in ("/proc", "/tmp", "/dev"):
        os.makedirs(root + folder, exist_ok=True)
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    for device in DEVICES:
        os.close(os.open(f"{root}/dev/{device}", os.O_CREAT, 0o666))
        mount(f"/dev/{device}", f"{root}/dev/{device}", None, MS_BIND)
    os.chmod(root + "/tmp", 0o777)
    os.chdir(root)
    mount(root, "/", None, MS_MOVE)
    os.chroot(".")
    os.chdir("/tmp")


def drop_rights(is_root: bool) -> None:
    """Give up every capability for good, also across exec, and become nobody where that is another user."""
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel has no more of them
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError("PR_SET_NO_NEW_PRIVS is refused")


def enter_user_namespace(inside: int, mapped: int) -> None:
    """In the child: leave root's user namespace; tell the parent, and wait until it has mapped the users."""
    if LIBC.unshare(CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the user namespace")
    os.write(inside, b".")
    if os.read(mapped, 1) != b".":
        raise OSError("the users were not mapped")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def map_users(child: int, inside: int, mapped: int) -> None:
    """In the parent: let every user of the child's new user namespace be the same user outside."""
    os.read(inside, 1)
    for name in ("gid_map", "uid_map"):
        descriptor = os.open(f"/proc/{child}/{name}", os.O_WRONLY)
        os.write(descriptor, b"0 0 65536\n")
        os.close(descriptor)
    os.write(mapped, b".")


def forbid_user_namespaces() -> None:
    """In a user namespace of our own, make further ones impossible: they would give capabilities back."""
    descriptor = os.open("/proc/sys/user/max_user_namespaces", os.O_WRONLY)
    os.write(descriptor, b"0")
    os.close(descriptor)


def set_limits(cpu_s: int, memory_bytes: int, file_bytes: int, processes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def main() -> None:
    root, python, prefix, is_root = sys.argv[1:5]
    source, ready, cpu_s, memory_bytes, file_bytes, processes = (int(word) for word in sys.argv[5:11])
    build_root(root, prefix, file_bytes)
    with open(source, "rb") as program, open("program.py", "wb") as copy:
        copy.write(program.read())
    os.chmod("program.py", 0o644)
    inside, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        if is_root == "1":
            enter_user_namespace(inside[1], mapped[0])
        forbid_user_namespaces()
        set_limits(cpu_s, memory_bytes, file_bytes, processes)
        drop_rights(is_root == "1")
        for descriptor in (*inside, *mapped):
            os.close(descriptor)
        os.write(ready, b"ready\n")
        os.close(ready)
        os.execve(python, [python, "-I", "-B", "program.py"], {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    os.close(ready)
    os.close(inside[1])
    if is_root == "1":
        map_users(child, inside[0], mapped[1])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


main()
