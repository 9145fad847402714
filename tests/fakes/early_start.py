"""What takes long to start and is waited for later: the real server and the whole run that many tests look at.

Both start with the first test of a session that needs them somewhere, and the tests that use them come behind those of
the same kind that do not. So nobody waits for what could have started meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import WholeRun, make_whole_run

SERVER, RUN = "tiny_server", "whole_run"
_FOLDERS = {"contract", "integration"}
_OVERRIDES = ("eval_every_n_versions=4", "actor.recorded_test_samples=32", "finetune.keep_best=success_rate")


def users_come_last(items: list[pytest.Item]) -> None:
    """Order the modules of contract and integration tests: without server or run, with the server, with the run."""
    needs: dict[Path, int] = {}
    for item in items:
        names = getattr(item, "fixturenames", ())
        need = 3 if item.path.parent.name not in _FOLDERS else 2 if RUN in names else 1 if SERVER in names else 0
        needs[item.path] = max(need, needs.get(item.path, 0))
    items.sort(key=lambda item: needs[item.path])


@contextmanager
def server_starting(folder: Path) -> Iterator[Future[VLLMProcess]]:
    """A server with a tied tiny Qwen2 and the prefix cache on; it is stopped at the end."""
    from fakes.random_model import save_random_model

    server = VLLMProcess(save_random_model(folder / "model", tied=True), folder / "server.log")
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.__enter__)
        try:
            yield started
        finally:
            server.stop()


@contextmanager
def run_under_way(folder: Path) -> Iterator[Future[WholeRun]]:
    """A run of a user's own task from start to end; the future has it when it is complete."""
    run = make_whole_run(folder)
    process = run.start(*_OVERRIDES)

    def finished() -> WholeRun:
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, f"{output}\n{run.logs()}"
        return run

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(finished)
        try:
            yield ended
        finally:
            if process.poll() is None:
                process.terminate()
