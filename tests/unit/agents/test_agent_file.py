"""The file of an agent function: run anew for every rollout, on the event loop or in threads, and its errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.fake_server import FakeServer
from transformers import PreTrainedTokenizerFast

from pipelinerl.agents import agent_func
from pipelinerl.agents.agent_func import AgentFile, check_config, generate_agent_rollout, read_step
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.rollouts import RolloutResult
from pipelinerl.tiny.tokenizer import build_tokenizer

COUNTS = """
turn = 0

async def step(state, action, label, **kwargs):
    global turn
    turn += 1
    return turn, state + action + " again", turn == 3, {"turn": turn}
"""
# What looks its own module up while it is defined, or later.
LOOKS_ITSELF_UP = """
from __future__ import annotations

import pickle
import sys
import typing
from dataclasses import dataclass, field


@dataclass
class Turn:
    number: int
    parts: list[str] = field(default_factory=list)


async def step(state: str, action: str, label: str, **kwargs: object) -> tuple[float, str, bool, dict]:
    assert typing.get_type_hints(Turn) == {"number": int, "parts": list[str]}
    assert pickle.loads(pickle.dumps(Turn(2, ["x"]))) == Turn(2, ["x"])
    assert sys.modules[__name__].Turn is Turn and sys.modules[__name__].__file__ == __file__
    return 1.0, state + action, True, {"is_main": __name__ == "__main__", "file_is_path": __file__ == FILE}
"""


@pytest.fixture(autouse=True)
def same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(32)


@pytest.fixture
def server(tokenizer: PreTrainedTokenizerFast) -> Iterator[FakeServer]:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with FakeServer(script=lambda body: [*tokenizer.encode("7"), end]) as fake:
        fake.version = "0"
        yield fake


def write(folder: Path, source: str, name: str = "agent_func.py") -> str:
    (folder / name).write_text(source)
    return str(folder / name)


async def play_at_once(server: FakeServer, tokenizer: Any, path: str, rollouts: int) -> list[RolloutResult]:
    cfg = SimpleNamespace(
        actor=SimpleNamespace(agent_func_path=path),
        agent=SimpleNamespace(max_steps=8, reward="sum", action_special_tokens=False),
    )
    async with open_session() as session:
        llms = [
            TrainableLLM(server.url, "actor", tokenizer, {"max_tokens": 9}, token=server.token) for _ in range(rollouts)
        ]
        return await asyncio.gather(*(generate_agent_rollout(cfg, llm, {"state": "go"}, session) for llm in llms))


def our_modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("pipelinerl_agent_func")}


async def test_every_rollout_has_globals_of_its_own(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rewards 1, 2 and 3 in each of them, also in the second five."""
    path = write(tmp_path, COUNTS)
    for _ in range(2):
        results = await play_at_once(server, tokenizer, path, 5)
        assert [result.metrics.num_steps for result in results] == [3] * 5
        assert [result.metrics.reward for result in results] == [6.0] * 5
    assert our_modules() == set()


async def test_what_looks_its_own_module_up_finds_it(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = str(tmp_path / "agent_func.py")
    write(tmp_path, LOOKS_ITSELF_UP.replace("FILE", repr(path)))
    for result in await play_at_once(server, tokenizer, path, 2):
        metrics = result.metrics.model_dump()
        assert (metrics["is_main"], metrics["file_is_path"]) == (0.0, 1.0)


async def test_a_module_beside_it_is_imported_once_and_shared(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write(tmp_path, "import itertools\n\nnumbers = itertools.count(1)\n", "beside_agent_func.py")
    path = write(
        tmp_path,
        "import beside_agent_func\n\n"
        "async def step(state, action, label):\n    return next(beside_agent_func.numbers), state + action, True\n",
    )
    before = list(sys.path)
    results = await play_at_once(server, tokenizer, path, 3)
    assert sorted(result.metrics.reward for result in results) == [1, 2, 3]
    assert sys.path == [*before, str(tmp_path)]
    del sys.modules["beside_agent_func"]


async def test_a_plain_function_may_block(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rollouts wait inside `step` for the other one, which only threads can do."""
    meeting = SimpleNamespace(barrier=threading.Barrier(2))
    monkeypatch.setitem(sys.modules, "meeting_of_steps", meeting)
    path = write(
        tmp_path,
        "import meeting_of_steps\n\nturn = 0\n\n"
        "def step(state, action, label):\n"
        "    global turn\n"
        "    turn += 1\n"
        "    meeting_of_steps.barrier.wait(60)\n"
        "    return turn, state + action, turn == 2\n",
    )
    results = await play_at_once(server, tokenizer, path, 2)
    assert [result.metrics.reward for result in results] == [3, 3]


async def test_a_plain_function_that_raises_stop_iteration_fails_at_once(tmp_path: Path) -> None:
    """A future cannot hold that exception: the rollout would wait until its time-out."""
    file = AgentFile(write(tmp_path, "def step(state, action, label):\n    return next(iter([]))\n"))
    with pytest.raises(RuntimeError, match="raised StopIteration"), file.episode() as step:
        async with asyncio.timeout(60):
            await file.call(step, "", "", None)


async def test_a_step_that_outlives_its_rollout_keeps_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next episode gets another name, until the thread has ended."""
    events = SimpleNamespace(started=threading.Event(), go_on=threading.Event(), modules=[])
    monkeypatch.setitem(sys.modules, "events_of_steps", events)
    source = (
        "import sys\n\nimport events_of_steps as events\n\n"
        "def step(state, action, label):\n"
        "    events.started.set()\n"
        "    events.go_on.wait(60)\n"
        "    events.modules.append(sys.modules[__name__].step is step)\n"
    )
    file = AgentFile(write(tmp_path, source))

    async def play() -> None:
        with file.episode() as step:
            await file.call(step, "", "", None)

    given_up = asyncio.create_task(play())
    assert await asyncio.to_thread(events.started.wait, 60)
    with caplog.at_level(logging.WARNING):
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
    assert len(caplog.records) == 1 and "agent_func.py:5" in caplog.text
    name = next(iter(our_modules()))
    with file.episode() as other:
        assert other.__module__ != name
        events.go_on.set()
        for thread in threading.enumerate():
            if thread.name == "agent":
                await asyncio.to_thread(thread.join, 60)
        assert events.modules == [True] and our_modules() == {other.__module__}
    assert our_modules() == set()


@pytest.mark.parametrize(
    ("source", "in_main"),
    [
        ("async def step(state, action, label):\n    return MAIN, state, True\n", 1.0),
        ("def step(state, action, label):\n    return MAIN, state, True\n", 0.0),
        # A plain function that makes a coroutine: made in a thread, run on the event loop.
        ("async def run():\n    return MAIN, '', True\n\ndef step(state, action, label):\n    return run()\n", 1.0),
        (
            "class Agent:\n    async def __call__(self, state, action, label):\n        return MAIN, '', True\n\n"
            "step = Agent()\n",
            1.0,
        ),
    ],
)
async def test_where_a_step_runs(
    source: str, in_main: float, server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    main = "float(threading.current_thread() is threading.main_thread())"
    path = write(tmp_path, "import threading\n\n" + source.replace("MAIN", main))
    (result,) = await play_at_once(server, tokenizer, path, 1)
    assert result.metrics.reward == in_main


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (None, "agent_func.py"),
        ("x = 1", "agent_func.py"),
        ("\nimport nothing_of_this_name", "agent_func.py:2 .*ModuleNotFoundError"),
        ("def broken():\n    return 1 / 0\n\nbroken()\n", "agent_func.py:2 .*ZeroDivisionError"),
        ("\ndef step(state): ...", r"step of \S*agent_func.py:2:"),
        ("\n\ndef step(", "agent_func.py:3 .*SyntaxError"),
        ("x = '\0'", "agent_func.py .*SyntaxError"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_line(source: str | None, place: str, tmp_path: Path) -> None:
    path = tmp_path / "agent_func.py"
    if source is not None:
        path.write_text(source)
    config: Any = SimpleNamespace(actor=SimpleNamespace(agent_func_path=str(path)))
    with pytest.raises(DomainError, match=f"^actor.agent_func_path: .*{place}"):
        check_config(config)
    assert our_modules() == set()


def test_a_wrong_return_value_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "\n\nasync def step(state, action, label): ...\n")
    file = AgentFile(path)
    with file.episode() as step, pytest.raises(DomainError, match=f"step of {path}:3"):
        read_step(None, file.where(step))


async def test_a_file_that_fails_later_fails_that_rollout_only(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The exception passes as it is: it is counted under its name, and its traceback names file and line."""
    flag = tmp_path / "flag"
    path = write(
        tmp_path,
        f"import pathlib\n\nif pathlib.Path({str(flag)!r}).exists():\n    raise ConnectionError('no service')\n\n"
        "def step(state, action, label):\n    return 1, state, True\n",
    )
    await play_at_once(server, tokenizer, path, 1)
    flag.touch()
    with pytest.raises(ConnectionError) as caught:
        await play_at_once(server, tokenizer, path, 1)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == (path, 4)
    flag.unlink()
    assert len(await play_at_once(server, tokenizer, path, 1)) == 1


def test_a_file_that_is_slow_to_run_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_func, "_SLOW_S", -1.0)
    file = AgentFile(write(tmp_path, "def step(state, action, label): ...\n"))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            file.check()
    (warning,) = caplog.records
    assert f"{tmp_path}/agent_func.py" in warning.message


def test_what_a_file_makes_is_freed_by_the_time_that_running_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector is off: only the one that the beginning of an episode calls frees the module of an earlier one."""
    file = AgentFile(write(tmp_path, "class Large: ...\n\nlarge = Large()\n\ndef step(state, action, label): ...\n"))
    gc.collect()
    gc.disable()
    try:
        freed = []
        for limit_s in (1e9, -1.0):
            monkeypatch.setattr(agent_func, "_COLLECT_AFTER_S", limit_s)
            with file.episode() as step:
                large = weakref.ref(step.__globals__["large"])
            del step
            file.check()
            freed.append(large() is None)
        assert freed == [False, True]
    finally:
        gc.enable()
