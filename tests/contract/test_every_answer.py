"""Calls to several workers of which some fail: the answers of a call never become those of the next one."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from pipelinerl.inference.engine import guarded, read_every_answer, values_of


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self, prefix: str = "") -> str:
        return f"{prefix}{self.rank}"

    def fail_on(self, *ranks: int) -> str:
        if self.rank in ranks:
            raise ValueError(f"rank {self.rank} has no room")
        return "well"

    def fail_silently(self) -> None:
        raise KeyError


class Executor:
    """As vLLM's: a queue of answers for each worker, read in order up to the first failure."""

    def __init__(self, workers: int) -> None:
        self.workers = [Worker(rank) for rank in range(workers)]
        self.queues: list[deque[Any]] = [deque() for _ in self.workers]

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Any = None,
    ) -> Any:
        for worker, queue in zip(self.workers, self.queues, strict=True):
            try:
                call = (
                    getattr(worker, method) if isinstance(method, str) else lambda *a, w=worker, **k: method(w, *a, **k)
                )
                answer = (True, call(*args, **(kwargs or {})))
            except Exception as error:  # noqa: BLE001 - as vLLM does
                answer = (False, error)
            if unique_reply_rank in (None, worker.rank):
                queue.append(answer)
        values = []
        for queue in self.queues if unique_reply_rank is None else [self.queues[unique_reply_rank]]:
            is_well, value = queue.popleft()
            if not is_well:
                raise RuntimeError(f"Worker failed with error '{value}'")
            values.append(value)
        return values if unique_reply_rank is None else values[0]


def changed(workers: int) -> Executor:
    class Changed(Executor):
        pass

    read_every_answer(Changed)
    read_every_answer(Changed)
    return Changed(workers)


@pytest.mark.parametrize("ranks", [(0,), (1,), (2,), (0, 1, 2), (1, 2)])
def test_after_a_failure_every_worker_answers_the_call_that_was_made(ranks: tuple[int, ...]) -> None:
    executor = changed(3)
    with pytest.raises(RuntimeError, match=rf"; {len(ranks)} of 3 workers") as caught:
        executor.collective_rpc("fail_on", args=ranks)
    # Each error, because one may be the consequence of another.
    assert all(f"'rank {rank} has no room' (worker {rank})" in str(caught.value) for rank in ranks)
    assert executor.collective_rpc("name", kwargs={"prefix": "w"}) == ["w0", "w1", "w2"]
    assert not any(executor.queues)


def test_one_worker_fails_in_the_words_of_vllm() -> None:
    executor = changed(1)
    with pytest.raises(RuntimeError, match=r"^Worker failed with error 'rank 0 has no room', please check"):
        executor.collective_rpc("fail_on", args=(0,))
    with pytest.raises(RuntimeError, match="error 'KeyError'"):
        executor.collective_rpc("fail_silently")
    with pytest.raises(RuntimeError, match="has no attribute 'nothing'"):
        executor.collective_rpc("nothing")


def test_the_executor_of_vllm_has_the_signature_that_is_expected() -> None:
    ours = inspect.signature(changed(1).collective_rpc).parameters
    names = ["method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank"]
    assert list(ours)[: len(names)] == names
    assert list(inspect.signature(MultiprocExecutor.collective_rpc).parameters)[1 : len(names) + 1] == names


def test_workers_that_fail_alike_are_named_together() -> None:
    with pytest.raises(
        RuntimeError, match=r"error 'gone' \(worker 0, 2\); 'other' \(worker 1\); 3 of 4 workers failed"
    ):
        values_of([(False, "gone"), (False, "other"), (False, "gone"), (True, 1)])
    assert values_of([(True, 1), (True, None)]) == [1, None]


def test_calls_of_the_running_model_are_left_alone() -> None:
    executor = changed(2)
    assert executor.collective_rpc("name", unique_reply_rank=1) == "1"
    assert executor.collective_rpc("name", non_block=True) == ["0", "1"]
    assert guarded(executor.workers[1], "name", (), {}) == (True, "1")
