"""R1 and R2 for games: the environment service answers whatever a game does, over HTTP behind the run's token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from fakes.served_app import served
from omegaconf import OmegaConf

from pipelinerl.domains.text_game import play
from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError
from pipelinerl.sandbox import pool as pool_module
from pipelinerl.sandbox.main import find_target, make_app
from pipelinerl.sandbox.pool import GamePool
from pipelinerl.sandbox.protocol import Failed, GameOpened, GameStep, Load, OpenGame
from pipelinerl.sandbox.services import Services, current_environments, open_environments

TESTS = Path(__file__).parents[2]
TOKEN = "environment-test-token-0123456789"
ECHO = "fakes.games.Echo"
TARGET = "pipelinerl.games.create_app"
# Of moves that come to an end; nobody waits so long.
LIMIT_S = 60.0
# Of moves that never end.
SHORT_S = 3.0


@pytest.fixture(autouse=True)
def _games_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PIPELINERL_SERVER_TOKEN", TOKEN)


def service(port: int = 0, **settings: Any) -> contextlib.AbstractAsyncContextManager[str]:
    return served(make_app({"_target_": TARGET, "processes": 1, "timeout_s": LIMIT_S, **settings}), TOKEN, port)


def pool(**settings: Any) -> GamePool:
    return GamePool(**{"size": 1, "timeout_s": LIMIT_S, "memory_bytes": 2 << 30, "max_games": 8, "idle_timeout_s": 3600,
                       **settings})  # fmt: skip


async def act_for_ever(games: GamePool, number: int, move: str) -> asyncio.Task[GameStep | Failed]:
    """A move that does not end, with a short deadline; the moves of others have the pool's."""
    process = games._games[number]
    games._timeout_s = SHORT_S
    playing = asyncio.create_task(games.act(number, move))
    while not process.turn.locked():  # noqa: ASYNC110 - until it is being made
        await asyncio.sleep(0)
    games._timeout_s = LIMIT_S
    return playing


async def begin(games: GamePool, **problem: Any) -> int:
    opened = await games.open(OpenGame(ECHO, {"moves": 3, **problem}))
    assert isinstance(opened, GameOpened), opened
    return opened.number


async def test_games_keep_their_state_and_do_not_mix() -> None:
    async with pool() as games:
        first, second = await begin(games), await begin(games)
        assert await games.act(first, "a") == GameStep("a 1", 0.0, False)
        assert await games.act(second, "b") == GameStep("b 1", 0.0, False)
        assert await games.act(first, "c") == GameStep("c 2", 0.0, False)
        assert await games.act(first, "d") == GameStep("d 3", 3.0, True)
        assert await games.act(second, "secret") == GameStep("False", 0.0, False)
        await games.close(first)
        assert games.num_games == 1 and games.num_processes == 1
    assert games.num_processes == 0


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        ("raise", "environment_raised"),
        ("nan", "environment_bad_result"),
        ("none", "environment_bad_result"),
        ("spin", "environment_timeout"),
    ],
)
async def test_r1_a_bad_move_costs_its_own_game_only(move: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The process ends the move by itself; it is not killed because that takes a while on a busy machine.
    monkeypatch.setattr(pool_module, "_KILL_GRACE_S", LIMIT_S)
    async with pool() as games:
        bad, other = await begin(games), await begin(games)
        failed = await (await act_for_ever(games, bad, move) if move == "spin" else games.act(bad, move))
        assert isinstance(failed, Failed) and failed.reason == reason
        assert await games.act(other, "a") == GameStep("a 1", 0.0, False)
        gone = await games.act(bad, "a")
        assert isinstance(gone, Failed) and gone.reason == "environment_lost"
        assert games.num_games == 1


async def test_r1_numbers_and_flags_of_numpy_are_a_step() -> None:
    async with pool() as games:
        first, other = await begin(games), await begin(games)
        assert await games.act(first, "numpy") == GameStep("n", 0.5, False)
        assert await games.act(other, "a") == GameStep("a 1", 0.0, False)


async def test_r1_a_game_whose_process_cannot_be_started_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(memory_bytes: int) -> None:
        raise OSError("no more processes")

    async with pool() as games:
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "start_child", refused)
            with pytest.raises(OSError, match="no more processes"):
                await games.open(OpenGame(ECHO, {"moves": 1}))
        assert games.num_games == 0


@pytest.mark.parametrize(("move", "reason"), [("block", "environment_timeout"), ("die", "environment_died")])
async def test_r1_a_process_that_is_stuck_or_gone_is_replaced(move: str, reason: str) -> None:
    async with pool() as games:
        bad, other = await begin(games), await begin(games)
        failed = await (await act_for_ever(games, bad, move) if move == "block" else games.act(bad, move))
        assert isinstance(failed, Failed) and failed.reason == reason
        lost = await games.act(other, "a")
        assert isinstance(lost, Failed) and lost.reason == "environment_lost"
        assert await games.act(await begin(games), "a") == GameStep("a 1", 0.0, False)


async def test_the_number_of_games_is_limited_and_idle_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pool_module, "monotonic", lambda: now[0])
    async with pool(max_games=2, idle_timeout_s=10) as games:
        first, _ = await begin(games), await begin(games)
        refused = await games.open(OpenGame(ECHO, {"moves": 1}))
        assert isinstance(refused, Failed) and refused.reason == "environment_busy"
        now[0] = 8.0
        await games.act(first, "a")
        now[0] = 11.0
        await begin(games)
        assert await games.act(first, "b") == GameStep("b 2", 0.0, False)


@pytest.mark.parametrize("path", ["fakes.games.not_a_game", "os.system", "fakes.no_such.Game"])
async def test_only_marked_classes_can_be_named(path: str) -> None:
    async with pool() as games:
        answer = await games.open(OpenGame(path, {}))
        assert isinstance(answer, Failed) and answer.reason == "environment_missing"


async def test_r2_a_hundred_games_go_on_beside_one_that_spins() -> None:
    async with pool(size=2, max_games=200) as games:
        bad = await begin(games)
        spinning = await act_for_ever(games, bad, "block")
        numbers = [await begin(games) for _ in range(100)]
        steps = await asyncio.gather(*(games.act(number, "x") for number in numbers))
        failed = await spinning
    assert isinstance(failed, Failed) and failed.reason == "environment_timeout"
    # Games that shared the process of the bad one are lost, and only those.
    lost = [step for step in steps if isinstance(step, Failed)]
    assert all(step.reason == "environment_lost" for step in lost) and len(lost) <= 51


class ScriptedModel:
    """A model whose chat answers `moves` one after the other."""

    def __init__(self, moves: list[str]) -> None:
        self.moves = list(moves)
        self.heard: list[str] = []
        self.turns: list[str] = []

    def chat(self, session: Any, messages: Any = ()) -> ScriptedModel:
        return self

    async def ask(self, text: str) -> Any:
        self.heard.append(text)
        self.turns.append(text)
        return SimpleNamespace(graded_text=self.moves.pop(0))

    def training_texts(self, reward: float) -> list[Any]:
        return []


PROBLEM = {"moves": 2, "max_turns": 5, "success_reward": 2.0, "dataset": "train"}
CONFIG = OmegaConf.create({"actor": {"system_prompt": None}})


@pytest.mark.parametrize("with_service", [False, True])
async def test_a_rollout_plays_in_a_service_or_in_its_own_process(with_service: bool) -> None:
    model: Any = ScriptedModel(["a", "b"])
    async with contextlib.AsyncExitStack() as stack:
        if with_service:
            url = await stack.enter_async_context(service())
            await stack.enter_async_context(open_environments([url], TOKEN))
        result = await play(CONFIG, model, PROBLEM, None, ECHO)  # type: ignore[arg-type]
    assert result.metrics.reward == 2.0 and result.metrics.success and result.dataset_name == "train"
    assert model.heard == ["go", "a 1"]


async def test_r1_a_game_that_fails_fails_its_rollout_with_the_reason() -> None:
    cases = (("raise", "environment_raised", LIMIT_S), ("spin", "environment_timeout", SHORT_S))
    for move, reason, timeout_s in cases:
        async with service(timeout_s=timeout_s) as url, open_environments([url], TOKEN):
            with pytest.raises(RolloutError) as caught:
                await play(CONFIG, ScriptedModel([move]), PROBLEM, None, ECHO)  # type: ignore[arg-type]
            assert caught.value.reason == reason and not isinstance(caught.value, RetryableRolloutError)


async def test_only_health_is_open() -> None:
    async with service() as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        for path in ("/ask", "/docs", "/openapi.json"):
            async with session.post(f"{url}{path}") as response:
                assert response.status == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for body in (b"{torn", msgspec.json.encode(Load("environment", "os.system"))):
            async with session.post(f"{url}/ask", data=body, headers=headers) as response:
                assert response.status == 400


async def test_health_answers_while_a_game_blocks() -> None:
    async with service(timeout_s=3000.0) as url, open_environments([url], TOKEN) as environments:
        game = await environments.open_game(ECHO, {"moves": 3})
        move = asyncio.create_task(game.act("block"))
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.get(f"{url}/health") as response:
                    assert response.status == 200 and not move.done()
        move.cancel()


async def test_another_service_is_taken_when_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.sandbox.services._FIRST_DELAY_S", 0.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with service() as url, open_environments([dead, url], TOKEN) as environments:
            game = await environments.open_game(ECHO, {"moves": 3})
            assert await game.act("a") == GameStep("a 1", 0.0, False)
            await game.close()
        monkeypatch.setattr("pipelinerl.sandbox.services.RETURN_TIMEOUT_S", 0.0)
        async with open_environments([dead], TOKEN) as environments:
            with pytest.raises(RetryableRolloutError, match="environment_unreachable"):
                await environments.open_game(ECHO, {"moves": 3})


async def test_l1_a_service_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.sandbox.services._ATTEMPTS", 1)
    monkeypatch.setattr("pipelinerl.sandbox.services._FIRST_DELAY_S", 0.01)
    tried = asyncio.Event()

    class Watched(Services):
        async def send(self, url: str, request: Any) -> Any:
            try:
                return await super().send(url, request)
            finally:
                tried.set()

    monkeypatch.setattr("pipelinerl.sandbox.services.Services", Watched)
    with socket.socket() as nobody:
        nobody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        async with open_environments([f"http://127.0.0.1:{port}"], TOKEN) as environments:
            begun = asyncio.create_task(environments.open_game(ECHO, {"moves": 3}))
            await tried.wait()
            async with service(port=port):
                game = await begun
                assert await game.act("a") == GameStep("a 1", 0.0, False)
                await game.close()


async def test_a_full_service_and_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.sandbox.services._FIRST_DELAY_S", 0.0)
    async with service(max_games=1) as url:
        async with open_environments([url], TOKEN) as environments:
            game = await environments.open_game(ECHO, {"moves": 3})
            with pytest.raises(RetryableRolloutError, match="environment_busy"):
                await environments.open_game(ECHO, {"moves": 3})
            await game.close()
            await (await environments.open_game(ECHO, {"moves": 3})).close()
        async with open_environments([url], "wrong") as environments:
            with pytest.raises(RolloutError, match="401"):
                await environments.open_game(ECHO, {"moves": 3})


def test_without_services_there_are_none() -> None:
    assert not current_environments()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "create_app"),
        ({"_target_": "no_such_module.app"}, "no_such_module"),
        ({"_target_": "pipelinerl.sandbox.service.nothing"}, "nothing"),
        ({"_target_": TARGET, "processors": 3}, "processors"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_before_the_run(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        find_target(environment)


def test_a_target_that_returns_no_application() -> None:
    with pytest.raises(DomainError, match="dict"):
        make_app({"_target_": "builtins.dict"})
