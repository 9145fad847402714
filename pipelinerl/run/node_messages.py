"""What the launchers of the nodes say to each other. msgspec JSON over an authenticated connection; nothing is pickled.

Node 0 plans and answers a `Hello` with a `Plan` or `Refused`; from then on both sides send `Beat`s, and the first
`Ended` of either side ends the run on all nodes. Behind a signal, both sides say `Stopping` first; the nodes above 0
then say `Saved` and go on until node 0 says `Ended`, because trainers of other nodes may need their servers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_BYTES = 1 << 20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A node offers itself. `busy_ports` are those of the scanned ranges that it cannot bind."""

    rank: int
    world_size: int
    version: str
    gpus: list[str]
    cores: int
    busy_ports: list[int]


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """Where the plan is: the run directory, on a file system that all nodes share. `token` opens the servers."""

    run_dir: str
    run_id: str
    incarnation: int
    token: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Node 0 cannot use this node."""

    reason: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The launcher lives."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The run is over on the sender's node, and has to be on all."""

    status: Literal["completed", "failed", "interrupted"]
    reason: str | None
    exit_code: int


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The sender's launcher got a signal: let trainers save, then end."""

    reason: str | None
    exit_code: int


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """No trainer of the sender's node is left to save."""


Message = Hello | Plan | Refused | Beat | Ended | Stopping | Saved


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode(data: bytes) -> Message:
    """Raises msgspec.MsgspecError for anything that is no message."""
    message: Message = msgspec.json.decode(data, type=Message)
    return message
