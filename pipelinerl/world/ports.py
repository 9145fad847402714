"""Free TCP ports for the plan of a run, such that two runs on one machine never get the same.

A port counts as free if it can be bound now and no other launcher has reserved it. The reservation is an abstract Unix
socket, held for the life of the launcher: servers bind their ports only half a minute after the plan was made. It is as
wide as the ports themselves, a network namespace, and leaves no file. A preferred port that is taken is replaced by
another one, unless the user chose it: then it is refused.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Mapping

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import WorldConfig
from pipelinerl.errors import ConfigError

#: Name of a reservation, before the number of the port.
RESERVED = "\0pipelinerl-port-"
_SCAN = 200
_PORT_KEYS = ("actor_group_port", "environment_start_port", "llm_start_port")


def can_bind(port: int) -> bool:
    """Whether nobody listens on that port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def scanned_ports(config: RunConfig, master_port: int) -> list[int]:
    """Ports that a plan may hand out. Other nodes say which of these they cannot bind."""
    starts = [master_port, *(getattr(config.world, key) for key in _PORT_KEYS)]
    return sorted({port for start in starts for port in range(start, min(start + _SCAN, 65536))})


class FreePorts:
    """Hands out TCP ports, each once per node. A context manager: leaving it frees the reservations.

    Args:
        config: of the run; a port that differs from its default was chosen by the user.
        rank: of this node. Ports of other nodes cannot be probed.
        busy_elsewhere: ports that other nodes cannot bind, by rank.
        reserve: whether other launchers must not get the same ports; not in a dry run.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int = 0,
        busy_elsewhere: Mapping[int, Collection[int]] | None = None,
        reserve: bool = True,
    ) -> None:
        defaults = WorldConfig.model_fields
        self._chosen = {f"world.{key}" for key in _PORT_KEYS if getattr(config.world, key) != defaults[key].default}
        self._rank = rank
        self._busy_elsewhere = busy_elsewhere or {}
        self._reserves = reserve
        self._taken: set[tuple[int, int]] = set()
        self._reserved: list[socket.socket] = []

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        """A port that is free on that node: `preferred`, or another one. `key` is where the user sets it.

        Raises:
            ConfigError: the user chose the port and it is taken, or none of 200 is free.
        """
        last = min(preferred + _SCAN, 65536)
        for port in range(preferred, last):
            if (node_rank, port) in self._taken:
                continue
            if self._is_free(node_rank, port):
                self._taken.add((node_rank, port))
                return port
            if key in self._chosen:
                raise ConfigError(
                    key,
                    port,
                    "a free port of this machine; another process uses it",
                    f"Choose another {key}, or leave it out to get a free port.",
                )
        raise ConfigError(key, preferred, f"a free port from {preferred} to {last - 1}", "Choose another start port.")

    def __enter__(self) -> FreePorts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._reserved:
            self._reserved.pop().close()

    def _is_free(self, node_rank: int, port: int) -> bool:
        if node_rank != self._rank:
            return port not in self._busy_elsewhere.get(node_rank, ())
        return can_bind(port) and (not self._reserves or self._reserve(port))

    def _reserve(self, port: int) -> bool:
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            reservation.bind(f"{RESERVED}{port}")
        except OSError:
            reservation.close()
            return False
        self._reserved.append(reservation)
        return True
