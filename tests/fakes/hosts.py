"""Several "hosts" on one machine: network namespaces with addresses of their own, each with a cable to a switch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces. Their interfaces are called `cable`."""

    names: tuple[str, ...]

    def on(self, rank: int) -> list[str]:
        """Words before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.names[rank]]

    def cut(self) -> None:
        """No packet gets from host 1 to another."""
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
def some_hosts(count: int) -> Iterator[Hosts]:
    switch, *names = (f"pipelinerl-{os.getpid()}-{number}" for number in range(-1, count))
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for name, address in zip(names, ADDRESSES, strict=False):
            _ip("-n", name, "link", "add", "cable", "type", "veth", "peer", name[-15:], "netns", switch)
            _ip("-n", switch, "link", "set", name[-15:], "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
        yield Hosts(tuple(names))
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
