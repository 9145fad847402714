"""What is known about servers and updates: plain data, handed to the trainer's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The phases of an update, in order. `load` is what the server does after the last byte arrived.
PHASES = ("pause", "start", "transfer", "load", "resume")


@dataclass(frozen=True)
class ServerAddress:
    """One server that receives weights.

    Attributes:
        name: for messages, for instance the job name.
        url: `http://host:port`.
        group_port: TCP port of this server's transfer group on the trainer's machine; None lets the system choose.
    """

    name: str
    url: str
    group_port: int | None = None


@dataclass(frozen=True)
class ServerUpdate:
    """One server that has the new weights and samples again."""

    name: str
    seconds: dict[str, float]
    recovered_from: str | None = None


@dataclass(frozen=True)
class UpdateReport:
    """The outcome of one update over all servers.

    Attributes:
        version: the policy version that was sent.
        updated: servers that have it.
        failed: name -> quoted error of servers that could not be given it even on the second attempt. They are left
            paused (half-loaded weights must not sample) and have to be restarted.
        total_s: wall-clock seconds of the whole call.
        sent_bytes: of the tensors that each server got.
    """

    version: int
    updated: list[ServerUpdate] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    total_s: float = 0.0
    sent_bytes: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """The slowest server's seconds by phase, `paused` of the one that stood still longest, and `total`.

        A server that took the update at the second attempt, or not at all, was paused for most of the call: it counts
        with all of it.
        """
        seconds = {"total": self.total_s, "paused": self.paused_s}
        for phase in PHASES:
            seconds[phase] = max((update.seconds.get(phase, 0.0) for update in self.updated), default=0.0)
        return seconds

    @property
    def paused_s(self) -> float:
        """Longest time that a server was paused, running steps that came to their end included."""
        if self.failed or any(update.recovered_from for update in self.updated):
            return self.total_s
        sums = [sum(update.seconds.get(phase, 0.0) for phase in PHASES) for update in self.updated]
        return min(self.total_s, max(sums, default=0.0))

    @property
    def num_servers(self) -> int:
        return len(self.updated)
