"""Fixtures of the whole suite. `tests/` is put on the import path: tests write `from fakes.fake_server import ...`."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from fakes.vllm_process import VLLMProcess

# How long an example takes is for the machine to say, not for a test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a file stays in one process, and all files with the real server are in the same one."""
    from xdist.scheduler import LoadFileScheduling  # not needed where tests run one by one

    class OneServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tiny_server" if has_server(config.rootpath / file) else file

    return OneServer(config, log) if config.getoption("dist") == "loadfile" else None


@functools.cache
def has_server(file: Path) -> bool:
    return "tiny_server" in file.read_text(encoding="utf-8")


def pytest_collection() -> None:
    gc.disable()  # nothing of what it imports is garbage, and looking for that takes a fifth of its time


def pytest_collection_finish() -> None:
    freeze_what_stays()
    gc.enable()


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


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """The one real vLLM server of the suite (CPU, tied tiny Qwen2, prefix cache on), about 11 s to start.

    A test that changes its weights starts by publishing known ones; nobody relies on what the last test left.
    """
    from fakes.random_model import save_random_model  # brings torch with it

    folder = tmp_path_factory.mktemp("tiny_server")
    with VLLMProcess(save_random_model(folder / "model", tied=True), folder / "server.log") as server:
        yield server
