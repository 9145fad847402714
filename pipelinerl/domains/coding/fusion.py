"""Runs a program on a SandboxFusion server (`POST /run_code`). Called by the grader, in a grader process.

Waits for the server, at most a few seconds longer than the program may run.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import msgspec

from pipelinerl.domains.coding.limits import Limits, Run, SandboxUnavailableError

_MARGIN_S = 10.0
_ENDINGS = {"Finished": "finished", "Error": "crashed", "TimeLimitExceeded": "time_limit"}


def run_remotely(endpoint: str, source: str, stdin: str = "", limits: Limits = Limits()) -> Run:  # noqa: B008
    """Run `source` with `stdin` on the server at `endpoint`.

    Raises:
        SandboxUnavailableError: the server cannot be reached, or its answer is none.
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
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=limits.wall_s + _MARGIN_S) as response:
            answer = msgspec.json.decode(response.read(4 * limits.output_bytes), type=dict[str, Any])
    except (urllib.error.URLError, OSError, msgspec.MsgspecError) as error:
        raise SandboxUnavailableError(f"sandbox_endpoint {url}: {error}. Check the address and the server.") from error
    result = answer.get("run_result") or {}
    ending = _ENDINGS.get(str(result.get("status")))
    if ending is None:
        raise SandboxUnavailableError(f"sandbox_endpoint {url}: the program was not run: {answer.get('message')}")
    if ending == "finished" and result.get("return_code") != 0:
        ending = "crashed"
    return Run(ending, str(result.get("stdout") or "")[: limits.output_bytes], str(result.get("stderr") or ""))  # type: ignore[arg-type]
