"""A server whose engine died ends soon, whatever it still has open: only then is it started again."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from fakes.random_model import save_random_model
from fakes.vllm_process import VLLMProcess

pytestmark = pytest.mark.slow


def _engine_of(server: VLLMProcess) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def test_an_update_that_waits_for_a_dead_engine_does_not_keep_the_server(tmp_path: Path) -> None:
    """vLLM never answers the call; the HTTP server would wait for it for ever."""
    model = save_random_model(tmp_path / "model", tied=True)
    with VLLMProcess(model, tmp_path / "server.log") as server:
        engine = _engine_of(server)
        engine.suspend()
        path, headers = "/pause?mode=keep&clear_cache=true", {"Authorization": f"Bearer {server.token}"}
        request = urllib.request.Request(server.url + path, b"", headers)
        outcome: list[object] = []

        def call() -> None:
            try:
                outcome.append(urllib.request.urlopen(request, timeout=300).status)
            except OSError as error:
                outcome.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        caller.join(2)
        assert not outcome, f"the call was to wait: {outcome}\n{(tmp_path / 'server.log').read_text()[-3000:]}"
        engine.kill()
        # The caller would wait for 300 s.
        server.wait_end(120)
        caller.join(60)
        assert outcome and not isinstance(outcome[0], int)
