"""Two "hosts" on one machine: network namespaces, joined by a cable, with addresses of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Hosts:
    """Names of the two namespaces. Their interfaces are called `cable`."""

    names: tuple[str, str]

    def on(self, rank: int) -> list[str]:
        """Words before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.names[rank]]

    def cut(self) -> None:
        """No packet gets from one to the other."""
        _ip("-n", self.names[1], "link", "set", "cable", "down")

    def join(self) -> None:
        _ip("-n", self.names[1], "link", "set", "cable", "up")


def why_not() -> str | None:
    """Why there cannot be any here."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "needs root and the command ip, for network namespaces"
    words = ["unshare", "--net", "ip", "link", "add", "cable", "type", "veth"]
    tried = subprocess.run(words, capture_output=True, check=False)
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.decode().strip()}"


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts((f"pipelinerl-{os.getpid()}-0", f"pipelinerl-{os.getpid()}-1"))
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
        _ip("-n", hosts.names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", hosts.names[1])
        for name, address in zip(hosts.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
