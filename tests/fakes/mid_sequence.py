"""Weight updates that fall into a running sequence, however fast the server is. For tests of real and fake servers."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

ATTEMPTS = 20
#: Nothing takes long; this only bounds a test that fails.
_LIMIT_S = 300.0
_RUNNING = "vllm:num_requests_running"


class Endpoint(Protocol):
    url: str
    token: str


def num_running(server: Endpoint) -> float:
    """Requests that the server is generating for, as its `/metrics` say."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_LIMIT_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_RUNNING))


def generate_across_updates(
    server: Endpoint, generate: Callable[[], dict[str, Any]], update: Callable[[int], None]
) -> dict[str, Any]:
    """Return an answer whose sequence was running when `update` began and ended after it.

    `generate` sends one request for one sequence. `update(attempt)` makes the updates; `attempt` counts from 0, for
    version numbers that rise. A sequence that ended too early is tried again: a fast server, or a test process that was
    held up, proves nothing about updates.

    Raises:
        AssertionError: no sequence crossed the updates in `ATTEMPTS` attempts.
    """
    for attempt in range(ATTEMPTS):
        answers: list[dict[str, Any]] = []
        request = threading.Thread(target=lambda answers=answers: answers.append(generate()))
        request.start()
        deadline = time.monotonic() + _LIMIT_S
        while request.is_alive() and num_running(server) == 0:
            assert time.monotonic() < deadline, "the request did not start to run"
        update(attempt)
        was_running = request.is_alive()
        request.join(_LIMIT_S)
        assert not request.is_alive(), "the request did not end"
        if was_running and len(answers[0]["choices"][0]["weight_versions"]) > 1:
            return answers[0]
    raise AssertionError(f"no sequence was still running after the updates, in {ATTEMPTS} attempts")
