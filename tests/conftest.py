"""Fixtures of the whole suite. `tests/` is put on the import path: tests write `from fakes.fake_server import ...`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from fakes import early_start
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import WholeRun

# How long an example takes is for the machine to say, not for a test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    early_start.users_come_last(items)


def pytest_collection_finish() -> None:
    freeze_what_stays()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        freeze_what_stays()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def freeze_what_stays() -> None:
    """Take what lives now, as the modules of all tests and of torch, out of what the collector goes through: it goes
    through it again and again, and a test that makes many objects took twice as long as alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _early(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What tests of this session need later is started now."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ExitStack() as stack:
        starts = {
            name: stack.enter_context(start(tmp_path_factory.mktemp(name)))
            for name, start in {
                early_start.SERVER: early_start.server_starting,
                early_start.RUN: early_start.run_under_way,
            }.items()
            if name in needed
        }
        yield starts


@pytest.fixture(scope="session")
def tiny_server(_early: dict[str, Any]) -> VLLMProcess:
    """The one real vLLM server of the suite (CPU, tied tiny Qwen2, prefix cache on), about 25 s to start.

    A test that changes its weights starts by publishing known ones; nobody relies on what the last test left.
    """
    server: VLLMProcess = _early[early_start.SERVER].result()
    return server


@pytest.fixture(scope="session")
def whole_run(_early: dict[str, Any]) -> WholeRun:
    """One run of a user's own task that has come to its end (about a minute); nobody changes its directory."""
    run: WholeRun = _early[early_start.RUN].result()
    return run
