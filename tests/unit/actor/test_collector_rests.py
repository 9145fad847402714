"""The actor keeps Python's garbage collector from blocking its event loop; `test_worker_pool.py` has the workers."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.actor import main


@pytest.fixture
def python_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("python_collector")
def test_the_actor_starts_with_what_is_loaded_frozen_and_seldom_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []

    def run(coroutine: Any) -> None:
        coroutine.close()
        seen.append((gc.get_freeze_count() > 0, gc.get_threshold()[0]))

    monkeypatch.setattr(main.uvloop, "run", run)
    monkeypatch.setattr(main, "load_problem_sets", lambda config: None)
    monkeypatch.delenv(main.DEATH_FD_KEY, raising=False)
    context: Any = types.SimpleNamespace(
        heartbeat=types.SimpleNamespace(waiting=lambda what: nullcontext()),
        config=None,
        run_dir=types.SimpleNamespace(root=Path("run")),
        job=types.SimpleNamespace(name="actor_0", workers=1),
    )

    main.main(context)

    assert seen == [(True, 20_000)]
