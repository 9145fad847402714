"""What launcher and trainer say about the servers that take part in a run: stream `pool`, one instance for each.

The launcher (instance `launch`) says which servers there are; the trainer (instance `finetune_0`) says which of them
have the weights. A server may sample for training while the newest `ServerReady` is about its newest start.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipelinerl.records.sample import SCHEMA_VERSION


class PoolChange(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the launcher: a server came up (`up`), is gone for now (`down`), or leaves for good (`removed`).

    `generation` counts the starts of this server: 0 is the start with the run, about which no `up` is written. A
    `down` is about the start that ended. `group_port` is the port of its transfer group on the trainer's machine, None:
    any.
    """

    name: str
    url: str
    event: Literal["up", "down", "removed"]
    generation: int
    time: float
    reason: str = ""
    group_port: int | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class ServerReady(msgspec.Struct, frozen=True, kw_only=True, tag="server_ready"):
    """Written by the trainer: start `generation` of this server samples with `version`, and its log-probs agree."""

    name: str
    generation: int
    version: int
    time: float
    probe_abs_diff: float | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class ServerDropped(msgspec.Struct, frozen=True, kw_only=True, tag="server_dropped"):
    """Written by the trainer: start `generation` of this server could not be given the weights; `error` says why."""

    name: str
    generation: int
    error: str
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


PoolAnswer = ServerReady | ServerDropped
