"""The error model of the whole package in one place.

One exception per boundary. `UserError` and its children mean that the user has to change something: the process
prints the message without a traceback and exits with `EXIT_USER_ERROR`. Everything else is a fault of the run.

* `ConfigError`     a key of the configuration is missing, unknown, of the wrong type, or contradicts another one
* `DomainError`     user code (dataset loader, rollout function) cannot be imported or has the wrong shape
* `StreamError`     a stream holds a record that cannot be read, or cannot be written
* `RolloutError`    one rollout failed; `RetryableRolloutError` may succeed if tried again
* `EndRunError`     no rollout can ever succeed
* `WeightSyncError` a server could not be given the weights
* `WorkerError`     a process of the run died or got stuck
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_USER_ERROR = 2
EXIT_RUN_FAILED = 1


class PipelineRLError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(PipelineRLError):
    """The user has to change something. Printed as one message, exit code 2, no traceback."""


class ConfigError(UserError):
    """A configuration value cannot be used.

    Args:
        key: dotted key, for instance `finetune.seq_length`.
        got: the value as the user wrote it.
        expected: what would have been right.
        next_step: what to do now.
    """

    def __init__(self, key: str, got: object, expected: str, next_step: str) -> None:
        self.key, self.got, self.expected, self.next_step = key, got, expected, next_step
        super().__init__(f"{key}: got {got!r}, expected {expected}. {next_step}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.got, self.expected, self.next_step)


class DomainError(UserError):
    """User code (dataset loader, rollout function, verifier) cannot be used; the message says what and where."""


class StreamError(PipelineRLError):
    """A stream cannot be read or written; the message names file or key, offset and reason."""


class NoRoom(StreamError):
    """The stream is full and nobody waits for its reader any more: the record was not written."""


class RolloutError(PipelineRLError):
    """One rollout failed for good. `reason` is a short word that is counted as a metric."""

    def __init__(self, reason: str, message: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {message}" if message else reason)


class RetryableRolloutError(RolloutError):
    """One attempt failed (timeout, 5xx, refused connection, abort); another attempt may succeed."""


class EndRunError(PipelineRLError):
    """A server's answer shows that no rollout can ever succeed (wrong token, unknown model or route)."""


class WeightSyncError(PipelineRLError):
    """A server could not be given the weights; `server` names it, the message quotes its error."""

    def __init__(self, server: str, message: str) -> None:
        self.server = server
        super().__init__(f"{server}: {message}")


class WorkerError(PipelineRLError):
    """A process of the run died or made no progress; the message names it and quotes its last error."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X?`, or a general hint when nothing is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Use one of these names."
