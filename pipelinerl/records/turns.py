"""How trainer and actor agree that no rollout runs: stream `turns`, one instance per process.

Only schedules other than `pipeline` use it. The trainer asks, the actor lets running rollouts end and answers; the
actor starts rollouts again when the weight update of that version, or a later one, is on the stream `trainer`.
"""

from __future__ import annotations

import msgspec

from pipelinerl.records.sample import SCHEMA_VERSION


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer rank 0: start no rollout until the servers have `version`; say when none runs."""

    version: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Actor: no rollout runs, and none starts before the servers have `version`."""

    version: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION
