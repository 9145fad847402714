"""The actor and its workers keep Python's garbage collector from holding their event loops."""

from __future__ import annotations

import asyncio
import gc
import socket
import types
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.actor import main, worker

Frozen = list[tuple[bool, int]]


@pytest.fixture
def python_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def state() -> tuple[bool, int]:
    return gc.get_freeze_count() > 0, gc.get_threshold()[0]


@pytest.mark.usefixtures("python_collector")
def test_the_actor_starts_with_what_is_loaded_frozen_and_seldom_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Frozen = []

    def run(coroutine: Any) -> None:
        coroutine.close()
        seen.append(state())

    monkeypatch.setattr(main.uvloop, "run", run)
    monkeypatch.setattr(main, "load_problem_sets", lambda config: None)
    monkeypatch.delenv(main.DEATH_FD_KEY, raising=False)
    context: Any = types.SimpleNamespace(
        heartbeat=types.SimpleNamespace(waiting=lambda what: nullcontext()),
        config=types.SimpleNamespace(actor=types.SimpleNamespace(rollout_workers=1)),
        run_dir=types.SimpleNamespace(root=Path("run")),
        job=types.SimpleNamespace(name="actor_0"),
    )

    main.main(context)

    assert seen == [(True, 20_000)]


@pytest.mark.usefixtures("python_collector")
def test_a_worker_serves_with_what_is_loaded_frozen_and_seldom_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: Frozen = []

    class Worker:
        def __init__(self, *args: Any) -> None: ...

        async def run(self) -> None:
            seen.append(state())

    config = types.SimpleNamespace(
        model_path="model", finetune=types.SimpleNamespace(trust_remote_code=False), verifier=None
    )
    monkeypatch.setattr(worker, "RolloutWorker", Worker)
    monkeypatch.setattr(worker, "load_config", lambda file: config)
    monkeypatch.setattr(worker, "load_rollout_function", lambda config: None)
    monkeypatch.setattr(worker, "load_tokenizer", lambda path, trust_remote_code: None)
    monkeypatch.setattr(worker, "read_identity", lambda file: types.SimpleNamespace(incarnation=0))
    world = types.SimpleNamespace(jobs_of=lambda kind: [])
    monkeypatch.setattr(worker, "WorldMap", types.SimpleNamespace(from_json=lambda content: world))
    monkeypatch.setattr(worker, "open_verifier", lambda *args: AsyncExitStack())
    monkeypatch.setattr(worker, "open_environments", lambda *args: AsyncExitStack())
    (tmp_path / "world.json").touch()
    monkeypatch.setattr(worker, "RunDir", lambda root: _files(root))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        asyncio.run(worker.serve(tmp_path, theirs, 60.0))

    assert seen == [(True, 20_000)]


def _files(root: Path) -> Any:
    return types.SimpleNamespace(config_file=root, identity_file=root, world_file=root / "world.json")
