"""Both of our schedulers around vLLM's, with made-up model outputs: when requests start, and that none is harmed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.random_model import save_random_model

pytest.importorskip("vllm")
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pipelinerl.inference.admission import BATCH_FRACTION_VARIABLE, WAIT_STEPS_VARIABLE
from pipelinerl.inference.scheduler import EpochAsyncScheduler, EpochScheduler

PLACES, PROMPT, BLOCK, ENOUGH_BLOCKS = 64, 20, 32, 1000
STEPS = 3  # a request waits at most, in these tests
MakeEngine = Callable[..., "Engine"]


class Engine:
    """The loop of an engine: two steps in flight with the asynchronous scheduler, one with the other."""

    def __init__(self, config: Any, is_async: bool, blocks: int) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = EpochAsyncScheduler if is_async else EpochScheduler
        self.scheduler = kind(config, caches, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)
        self.tokens: dict[str, list[int]] = {}
        self.started: dict[str, int] = {}  # step in which each request started
        self.came: dict[str, int] = {}
        self.steps: list[dict[str, int]] = []  # tokens of each request, by step
        self.preempted = 0
        self._depth = 2 if is_async else 1
        self._in_flight: deque[tuple[Any, list[str]]] = deque()

    def add(self, name: str, max_tokens: int, prompt: int = PROMPT, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        ids = [5 + number % 100 for number in range(prompt)]
        self.came[name] = len(self.steps)
        self.tokens[name] = []
        self.scheduler.add_request(Request(name, ids, params, None, priority=priority))

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.preempted += len(scheduled.preempted_req_ids or ())
            self.steps.append(dict(scheduled.num_scheduled_tokens))
            for name in scheduled.num_scheduled_tokens:
                self.started.setdefault(name, len(self.steps) - 1)
            # The last piece of a prompt and every later step sample a token.
            sampled = [
                name for name in scheduled.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk
            ]
            self._in_flight.append((scheduled, sampled))
            if len(self._in_flight) < self._depth:
                return
        if self._in_flight:
            self._finish(*self._in_flight.popleft())

    def run(self) -> None:
        for _ in range(5000):
            if not (self.scheduler.has_requests() or self._in_flight):
                return
            self.step()
        raise AssertionError("the engine never came to an end")

    def waited(self, name: str) -> int:
        return self.started[name] - self.came[name]

    def _finish(self, scheduled: Any, sampled: list[str]) -> None:
        names = list(scheduled.num_scheduled_tokens)
        # Of a request and its position, so that any order of the steps gives the same answer.
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[5 + len(self.tokens[name]) % 90] if name in sampled else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
        )
        for name in sampled:
            self.tokens[name].append(5 + len(self.tokens[name]) % 90)
        self.told = self.scheduler.update_from_output(scheduled, output)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_random_model(tmp_path_factory.mktemp("batched_start") / "model", tied=True)
    engine = EngineArgs(
        model=str(model), max_model_len=512, max_num_seqs=PLACES, block_size=BLOCK, enable_prefix_caching=False,
        max_num_batched_tokens=4096, enable_chunked_prefill=True,
    )  # fmt: skip
    return engine.create_engine_config()


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def make_engine(request: pytest.FixtureRequest, config: Any, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    def make(
        steps: int = STEPS,
        blocks: int = ENOUGH_BLOCKS,
        fraction: float = 1 / 16,
        budget: int = 4096,
        chunks: bool = True,
        policy: str = "fcfs",
    ) -> Engine:
        monkeypatch.setenv(WAIT_STEPS_VARIABLE, str(steps))
        monkeypatch.setenv(BATCH_FRACTION_VARIABLE, str(fraction))
        # A CPU's platform refuses the first; the scheduler does not mind.
        monkeypatch.setattr(config.scheduler_config, "async_scheduling", request.param)
        monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", budget)
        monkeypatch.setattr(config.scheduler_config, "enable_chunked_prefill", chunks)
        monkeypatch.setattr(config.scheduler_config, "policy", policy)
        monkeypatch.setattr(config.cache_config, "num_gpu_blocks", blocks)
        return Engine(config, request.param, blocks)

    return make


def running(make_engine: MakeEngine, count: int, max_tokens: int = 200, **options: Any) -> Engine:
    """An engine with `count` requests that decode."""
    engine = make_engine(**options)
    for number in range(count):
        engine.add(f"old-{number}", max_tokens)
    while len(engine.started) < count or max(engine.steps[-1].values()) > 1:
        engine.step()
    return engine


def test_one_waits_for_others_but_not_for_long(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40)  # 40 / 16: two are a batch
    engine.add("alone", 5)
    for _ in range(STEPS):
        engine.step()
        assert set(engine.steps[-1].values()) == {1} and len(engine.steps[-1]) == 40
    engine.step()
    assert engine.steps[-1]["alone"] == PROMPT
    engine.add("first", 5)
    engine.step()
    assert "first" not in engine.steps[-1]
    engine.add("second", 5)
    engine.step()
    assert engine.steps[-1]["first"] == engine.steps[-1]["second"] == PROMPT
    engine.run()
    assert {len(tokens) for name, tokens in engine.tokens.items() if "old" not in name} == {5}


def test_beside_few_a_request_starts_at_once(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 31)
    engine.add("late", 5)
    engine.step()
    assert engine.waited("late") == 0


def test_off_means_at_once(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40, steps=0)
    engine.add("late", 5)
    engine.step()
    assert engine.waited("late") == 0


def test_no_step_is_empty_while_a_request_waits(make_engine: MakeEngine) -> None:
    """All that run end with the step that is in flight: with two steps in flight, there is nothing else to compute."""
    engine = make_engine(steps=64)
    for number in range(40):
        engine.add(f"old-{number}", 6)
    for _ in range(4):
        engine.step()
    engine.add("late", 5)
    engine.run()
    first = engine.started["late"]
    assert engine.waited("late") <= 2 and all(engine.steps[: first + 5])
    assert len(engine.tokens["late"]) == 5


def test_one_in_every_step_starves_nobody(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40, max_tokens=100, fraction=1.0)  # a batch would be all that run
    for number in range(20):
        engine.add(f"new-{number}", 30)
        engine.step()
    engine.run()
    waited = [engine.waited(f"new-{number}") for number in range(20)]
    assert waited == [3, 2, 1, 0] * 5
    assert all(len(engine.tokens[f"new-{number}"]) == 30 for number in range(20))


def test_a_queue_behind_taken_places_starts_in_batches(make_engine: MakeEngine) -> None:
    """Places come free one by one; what counts is how many are free, not how many wait for them."""
    engine = make_engine(steps=8)
    for number in range(PLACES):
        engine.add(f"old-{number}", 10 + number)
    for number in range(40):
        engine.add(f"new-{number}", 100)
    engine.run()
    starts = sorted(engine.started[f"new-{number}"] for number in range(40))
    batches = [starts.count(step) for step in sorted(set(starts))]
    assert batches == [3] * 13 + [1], "with 3 places free 61 run, and 61 / 16 is 3; the last one waits for its time"
    assert {len(engine.tokens[f"new-{number}"]) for number in range(40)} == {100}


@pytest.mark.parametrize("chunks", [True, False])
def test_a_batch_that_is_too_much_for_one_step_goes_on_in_the_next(make_engine: MakeEngine, chunks: bool) -> None:
    steps = {}
    for wait in (0, 8):
        engine = make_engine(steps=wait, budget=512, chunks=chunks)
        for number in range(PLACES):
            engine.add(f"r{number}", 40, prompt=30)
        engine.run()
        steps[wait] = [engine.started[f"r{number}"] for number in range(PLACES)]
    assert steps[0] == steps[8] and max(steps[8]) >= 3


def test_others_start_with_the_pieces_of_a_long_prompt(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40, budget=100)
    engine.add("long", 5, prompt=200)  # 60 tokens a step beside 40 that decode
    for _ in range(STEPS + 1):
        engine.step()
    assert engine.steps[-1]["long"] == 60
    engine.step()
    assert engine.steps[-1]["long"] == 60
    # Its last piece leaves room for another one, which need not wait: the step is slow anyway.
    engine.step()
    engine.add("short", 5, prompt=10)
    engine.step()
    assert engine.steps[-1]["long"] == 200 - 3 * 60 - 0 and engine.steps[-1]["short"] == 10


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_all_end_with_the_same_tokens_whatever_comes_when(make_engine: MakeEngine, policy: str) -> None:
    lengths = [50 + 350 * (number % 10 == 0) for number in range(300)]
    found = {}
    for steps in (0, 8):
        engine, draws, number = make_engine(steps=steps, policy=policy), random.Random(0), 0
        while number < len(lengths):
            for _ in range(draws.choice([0, 0, 1, 1, 2, 5])):
                if number < len(lengths):
                    engine.add(f"r{number}", lengths[number], priority=draws.randrange(3))
                    number += 1
            engine.step()
        engine.run()
        found[steps] = engine
    assert found[0].tokens == found[8].tokens
    assert [len(found[8].tokens[f"r{number}"]) for number in range(300)] == lengths

    def share_of_slow_steps(engine: Engine) -> float:
        return sum(max(step.values(), default=0) > 1 for step in engine.steps) / len(engine.steps)

    assert share_of_slow_steps(found[8]) < 0.6 * share_of_slow_steps(found[0])


def test_requests_that_lose_their_memory_come_back(make_engine: MakeEngine) -> None:
    """40 requests of 20 + 100 tokens need 4 blocks each at the end, and there are 100."""
    engine = make_engine(blocks=100, steps=8)
    for number in range(40):
        engine.add(f"old-{number}", 100)
    for number in range(30):
        engine.step()
        engine.add(f"new-{number}", 100)
    engine.run()
    assert sum(request.startswith("old") for request in engine.tokens) == 40
    assert {len(tokens) for tokens in engine.tokens.values()} == {100}
    restarts = sum(tokens > PROMPT for step in engine.steps for tokens in step.values())
    assert restarts > 0, "some were preempted, and computed their prompt and tokens again"


def test_a_pause_holds_all_and_the_held_ones_start_with_the_new_weights(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40)
    engine.add("held", 5)
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.pause_state == PauseState.UNPAUSED, "nobody else sees how they are held back"
    assert scheduler.requests["held"].cache_salt == "weights-epoch-0:"
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.get_num_unfinished_requests() == 0
    for _ in range(3 * STEPS):
        engine.step()
    assert "held" not in engine.started
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.requests["held"].cache_salt == "weights-epoch-1:"
    before = len(engine.steps)
    for _ in range(STEPS):
        engine.step()
    assert before < engine.started["held"] + 1 <= before + STEPS
    assert scheduler.requests["held"].cache_salt == "weights-epoch-1:"
    engine.run()
    assert len(engine.tokens["held"]) == 5


def test_a_pause_that_lets_the_running_ones_end_starts_nobody(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40, max_tokens=20)
    engine.add("held", 5)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run()
    assert {len(tokens) for name, tokens in engine.tokens.items() if name != "held"} == {20}
    assert "held" not in engine.started
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    step = len(engine.steps)
    engine.run()
    assert engine.started["held"] == step and len(engine.tokens["held"]) == 5


def test_after_a_pause_that_clears_the_cache_all_go_on_at_once(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40)
    engine.add("held", 5)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(2):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    step = len(engine.steps)
    engine.step()
    assert len(engine.steps[step]) == 41 and min(engine.steps[step].values()) >= PROMPT


def test_a_held_request_can_be_given_up(make_engine: MakeEngine) -> None:
    engine = running(make_engine, 40)
    engine.add("given-up", 5)
    for _ in range(STEPS):
        engine.step()
    ended = engine.scheduler.finish_requests("given-up", RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in ended] == ["given-up"]
    engine.step()
    engine.add("next", 5)  # its time begins now
    for _ in range(STEPS + 1):
        engine.step()
    assert "given-up" not in engine.started and engine.waited("next") == STEPS
    engine.run()
    assert not engine.scheduler.requests


def test_an_error_in_a_step_leaves_no_pause_behind(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = running(make_engine, 40)
    engine.add("held", 5)

    def broken() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.scheduler.kv_cache_manager, "new_step_starts", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.scheduler.schedule()
    assert engine.scheduler.pause_state == PauseState.UNPAUSED
