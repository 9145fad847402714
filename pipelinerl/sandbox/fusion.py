"""Runs a program on a SandboxFusion server (`POST /run_code`). Called by the grader, in its process, and by the check.

Waits for the server: for each program a few seconds longer than it may run, and for a server that is busy or away as
long as the `Patience` of the whole grading lasts.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pipelinerl.errors import RetryableRolloutError
from pipelinerl.sandbox.programs import Limits, ProgramRun, SandboxUnavailableError

UNREACHABLE = "sandbox_unreachable"
PATIENCE_S = 30.0
MARGIN_S = 10.0
_ENDINGS = {"Finished": "finished", "Error": "crashed", "TimeLimitExceeded": "time_limit"}
_PASSING_STATUSES = (408, 425, 429)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 4.0
# JSON writes one byte as at most six characters.
_MAX_ESCAPE = 6
_QUOTED_BYTES = 300


class Patience:
    """Seconds that failed attempts, and the pauses after them, may take for all programs of one answer together."""

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self._left_s = seconds

    def has(self, seconds: float) -> bool:
        """Take `seconds` and return True, or return False if that is more than is left."""
        self._left_s -= seconds
        return self._left_s >= 0


class _PassingError(Exception):
    """This attempt failed, another one may not."""


def is_endpoint(endpoint: str) -> bool:
    """Return whether this looks like the address of an HTTP server."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        return False


def grading_timeout_s(num_tests: int, limits: Limits) -> float:
    """Seconds that grading an answer may take, including the longest attempt, begun when patience just ends."""
    return (num_tests + 1) * (limits.wall_s + MARGIN_S) + PATIENCE_S + _LONGEST_DELAY_S


def run_remotely(
    endpoint: str,
    source: str,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
    patience: Patience | None = None,
) -> ProgramRun:
    """Run `source` with `stdin` on the server at `endpoint`; time-outs, lost connections and 5xx are tried again.

    Raises:
        SandboxUnavailableError: the server refuses the request, or its answer is none of SandboxFusion.
        RetryableRolloutError: `sandbox_unreachable`: it was busy or away for longer than `patience`.
    """
    url = endpoint.rstrip("/") + "/run_code"
    body = {
        "code": source,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    request = urllib.request.Request(url, msgspec.json.encode(body), {"Content-Type": "application/json"})
    patience = patience or Patience()
    attempts = 0
    while True:
        started = time.monotonic()
        try:
            answer = _post(request, limits)
            return ProgramRun("output_limit", "") if answer is None else _read(answer, limits)
        except _PassingError as error:
            delay_s = min(_FIRST_DELAY_S * 2**attempts, _LONGEST_DELAY_S)
            attempts += 1
            if not patience.has(time.monotonic() - started + delay_s):
                raise RetryableRolloutError(UNREACHABLE, f"{url}: {error} ({attempts} attempts)") from error
            # Nothing says when the server is free again. Only this grader waits, in a process of its own.
            time.sleep(delay_s)
        except SandboxUnavailableError as error:
            raise SandboxUnavailableError(
                f"sandbox_endpoint {url}: {error}. Check the address and the server."
            ) from error


def _post(request: urllib.request.Request, limits: Limits) -> dict[str, Any] | None:
    """Return the server's answer; None if it is longer than one of an output within its limit can be."""
    longest = 2 * _MAX_ESCAPE * limits.output_bytes
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=limits.wall_s + MARGIN_S) as response:
            content = response.read(longest + 1)
            # Of an answer that ends before its announced length, `read` gives what there is.
            is_cut = len(content) <= longest and bool(response.length)
    except urllib.error.HTTPError as error:
        with error:
            text = f"status {error.code}: {' '.join(error.read(_QUOTED_BYTES).decode(errors='replace').split())}"
        if error.code >= 500 or error.code in _PASSING_STATUSES:
            raise _PassingError(text) from error
        raise SandboxUnavailableError(text) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise _PassingError(str(error.reason) or type(error.reason).__name__) from error
        raise SandboxUnavailableError(str(error.reason)) from error
    except http.client.InvalidURL as error:
        raise SandboxUnavailableError("this is no address") from error
    except (OSError, http.client.HTTPException) as error:
        raise _PassingError(f"{type(error).__name__}: {error}") from error
    if is_cut:
        raise _PassingError("the connection was lost in the middle of the answer")
    if len(content) > longest:
        return None
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SandboxUnavailableError(f"not an answer of SandboxFusion: {error}") from error


def _read(answer: dict[str, Any], limits: Limits) -> ProgramRun:
    result = answer.get("run_result")
    if answer.get("status") == "SandboxError":
        raise _PassingError(f"SandboxError: {str(answer.get('message'))[:_QUOTED_BYTES]}")
    ending = _ENDINGS.get(str(result.get("status"))) if isinstance(result, dict) else None
    if ending is None or not isinstance(result, dict):
        raise SandboxUnavailableError(f"the program was not run: {str(answer.get('message'))[:_QUOTED_BYTES]}")
    if ending == "finished" and result.get("return_code") != 0:
        ending = "crashed"
    outputs = [str(result.get(name) or "").encode("utf-8", "replace") for name in ("stdout", "stderr")]
    if any(len(output) > limits.output_bytes for output in outputs):
        ending = "output_limit"
    out, err = (output[: limits.output_bytes].decode("utf-8", "replace") for output in outputs)
    return ProgramRun(ending, out, err)  # type: ignore[arg-type]
