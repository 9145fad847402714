"""What the actor does when a worker dies, a rollout never returns, user code is wrong, or a server refuses it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fakes.actor_run import TASK, ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def follow_version(server: FakeServer) -> Callable[[int], None]:
    def set_version(version: int) -> None:
        server.version = str(version)

    return set_version


def failures_of(run: ActorRun) -> set[str]:
    """Reasons of failed rollouts. A group that started after the last step is given up, which is none."""
    return {fate.reason for fate in run.fates if fate.fate == "failed"}


def edited_task(body: str) -> str:
    """The standard task with `body` at the start of each rollout."""
    marker = "    calls = []\n"
    assert marker in TASK
    return TASK.replace(marker, body + marker)


def test_l3_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path, model: Path) -> None:
    with FakeServer(token_delay_s=0.05) as server:
        run, started = ActorRun(tmp_path, model, [server.url], server.token), time.monotonic()
        with run.started(), CountingTrainer(run, steps=10_000, on_version=follow_version(server)):
            while not server.requests:
                assert time.monotonic() - started < PROCESS_LIMIT_S, run.stderr
                time.sleep(0.05)
            start_s = time.monotonic() - started
            assert run.process is not None
            (worker,) = psutil.Process(run.process.pid).children()
            killed = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            assert run.wait(PROCESS_LIMIT_S) == 1
            # Longer than 30 s only where the start, on the machine as it is now, took as long.
            assert time.monotonic() - killed < max(30, start_s)
    assert f"rollout worker 0 (pid {worker.pid}) ended by signal SIGKILL" in run.stderr


def never_return(folder: Path) -> str:
    """Two rollouts that never return, so that the others can have a deadline that they meet on any machine."""
    folder.mkdir()
    return edited_task(
        f"    import pathlib\n    hang = pathlib.Path({str(folder)!r})\n"
        "    if problem['dataset'] == 'train' and llm.seed % 4 == 0 and len(list(hang.iterdir())) < 2:\n"
        "        (hang / str(llm.seed)).touch()\n        await asyncio.Event().wait()\n"
    )


def test_l4_a_rollout_that_never_returns_costs_only_itself(tmp_path: Path, model: Path) -> None:
    hangs = tmp_path / "mark"
    with FakeServer() as server:
        actor = {"rollout_timeout_s": 6}
        run = ActorRun(tmp_path, model, [server.url], server.token, never_return(hangs), actor=actor)
        with run.started(), CountingTrainer(run, steps=3, on_version=follow_version(server)) as trainer:
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    assert len(list(hangs.iterdir())) == 2
    assert len(trainer.batches) == 3
    timed_out = [fate for fate in run.fates if fate.reason == "rollout_timeout"]
    assert timed_out and all(fate.fate == "failed" and fate.num_rollouts >= 1 for fate in timed_out)
    by_id = {group.id: group for group in run.groups}
    partial = [by_id[fate.group_id] for fate in timed_out if fate.group_id in by_id]
    assert all(group.failed_rollouts == 1 and len(group.rollouts) == 1 for group in partial)
    assert len(run.evaluations) == 2


def test_t4_greedy_evaluations_count_and_greedy_training_rollouts_are_not_trained(tmp_path: Path, model: Path) -> None:
    task = edited_task(
        "    if problem['dataset'] == 'train' and llm.seed % 4 == 0:\n        llm.parameters['temperature'] = 0.0\n"
        "    assert problem['dataset'] == 'train' or llm.parameters['temperature'] == 0\n"
    )
    with FakeServer() as server:
        greedy = {"parameters": {"temperature": 0}}
        run = ActorRun(tmp_path, model, [server.url], server.token, task, test_llm=greedy)
        with run.started(), CountingTrainer(run, steps=3, on_version=follow_version(server)):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    refused = [fate for fate in run.fates if fate.reason == "other_temperature"]
    assert refused and all(fate.fate == "failed" for fate in refused)
    samples = [sample for group in run.groups for sample in group.samples]
    assert samples and {sample.temperature for sample in samples} == {1.0}
    assert [result.num_failed for result in run.evaluations] == [0, 0]


def test_a_rollout_that_returns_nothing_is_a_user_error(tmp_path: Path, model: Path) -> None:
    with FakeServer() as server:
        run = ActorRun(tmp_path, model, [server.url], server.token, edited_task("    return None\n"))
        with run.started(), CountingTrainer(run, steps=2, on_version=follow_version(server)):
            assert run.wait(PROCESS_LIMIT_S) == 2
    (message,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert "my_task.py" in message and "returned None, expected a RolloutResult" in message
    assert "Traceback" not in run.stderr


def test_o2_evaluations_that_fail_do_not_end_training_and_grader_errors_cost_their_rollout(
    tmp_path: Path, model: Path
) -> None:
    task = edited_task(
        "    if problem['dataset'] == 'test' or llm.seed % 4 == 0:\n        raise ZeroDivisionError('grader')\n"
    )
    with FakeServer() as server:
        run = ActorRun(tmp_path, model, [server.url], server.token, task, eval_every_n_versions=1)
        with run.started(), CountingTrainer(run, steps=3, on_version=follow_version(server)) as trainer:
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    assert len(trainer.batches) == 3
    first, *_, last = run.evaluations
    assert (first.due_version, last.due_version, last.is_final) == (0, 3, True)
    assert all(result.num_failed == 6 and result.success_rate is None for result in run.evaluations)
    assert "evaluation of version 3 failed" in run.stderr
    assert {fate.reason for fate in run.fates} <= {"started", "exception_ZeroDivisionError", "training_done"}
    assert "grader" in run.stderr


def test_o2_user_code_that_exits_costs_its_rollout(tmp_path: Path, model: Path) -> None:
    """`sys.exit` in a grader would end the worker, with the exit code of one that got stuck."""
    task = edited_task("    if problem['dataset'] == 'train' and llm.seed % 4 == 0:\n        raise SystemExit(1)\n")
    with FakeServer() as server:
        run = ActorRun(tmp_path, model, [server.url], server.token, task)
        with run.started(), CountingTrainer(run, steps=3, on_version=follow_version(server)):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    assert failures_of(run) == {"exception_SystemExit"}
    assert "is replaced" not in run.stderr


ODD_VALUES = """
import numpy

_plain_rollout = generate_rollout


async def generate_rollout(cfg, llm, problem, session):
    result = await _plain_rollout(cfg, llm, problem, session)
    text = result.training_texts[0]
    match problem["id"]:
        case "train-0":
            text.metadata = {"score": float("nan"), "said": "half \\ud83d", "seed": 1 << 80, "list": numpy.arange(2)}
        case "train-1":
            raise ValueError("half \\ud83d")
        case "train-2":
            text.finish_reason = "half \\ud83d"
        case "train-3":
            text.input_ids = list(numpy.array(text.input_ids))
        case "train-4":
            result.latency = float("nan")
    return result
"""


def test_o2_values_that_cannot_be_written_cost_at_most_their_rollout(tmp_path: Path, model: Path) -> None:
    with FakeServer() as server:
        actor = {"llm_max_rollouts": 8, "max_failure_rate": 1.0}
        run = ActorRun(tmp_path, model, [server.url], server.token, TASK + ODD_VALUES, actor=actor)
        with run.started(), CountingTrainer(run, steps=3, on_version=follow_version(server)):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    assert failures_of(run) == {"exception_ValueError", "bad_value"}
    odd = [s for group in run.groups for s in group.samples if s.metadata.get("score") is not None]
    assert odd and {sample.metadata["score"] for sample in odd} == {"NaN"}
    assert odd[0].metadata == {"score": "NaN", "said": "half ?", "seed": str(1 << 80), "list": "[0 1]"}


def test_a_wrong_token_ends_the_run(tmp_path: Path, model: Path) -> None:
    with FakeServer() as server:
        run = ActorRun(tmp_path, model, [server.url], "another-token-0123456789")
        with run.started(), CountingTrainer(run, steps=2, on_version=follow_version(server)):
            assert run.wait(PROCESS_LIMIT_S) == 1
    assert "status 401" in run.stderr
    assert "another-token" not in run.stderr


def test_evaluations_beside_training_and_two_servers(tmp_path: Path, model: Path) -> None:
    with FakeServer(token_delay_s=0.002) as first, FakeServer(token_delay_s=0.002) as second:

        def set_version(version: int) -> None:
            # Version 3 comes when the evaluation of version 2 is done, version 5 when that of version 4 is.
            deadline = time.monotonic() + PROCESS_LIMIT_S
            while version in (3, 5) and version - 1 not in {result.due_version for result in run.evaluations}:
                assert time.monotonic() < deadline and run.process is not None and run.process.poll() is None
                time.sleep(0.05)
            first.version = second.version = str(version)

        second.token = first.token
        run = ActorRun(
            tmp_path,
            model,
            [first.url, second.url],
            first.token,
            max_lag=16,
            eval_every_n_versions=2,
            actor={"rollout_workers": 2, "test_samples": 4},
        )
        with run.started(), CountingTrainer(run, steps=5, on_version=set_version):
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    assert [(result.due_version, result.is_final) for result in run.evaluations] == [
        (0, False),
        (2, False),
        (4, False),
        (5, True),
    ]
    assert all(result.num_rollouts == 4 for result in run.evaluations)
    # The least busy server is taken, so both have work.
    assert min(len(first.requests), len(second.requests)) > 0.3 * len(first.requests + second.requests)
    seeds = [request["sampling_params"]["seed"] for request in first.requests + second.requests]
    assert len(set(seeds)) > len(seeds) / 2


def test_l3_a_corrupt_message_of_the_trainer_ends_the_run_with_its_place(tmp_path: Path, model: Path) -> None:
    with FakeServer(token_delay_s=0.05) as server:
        run = ActorRun(tmp_path, model, [server.url], server.token)
        shard = run.files.streams / "trainer" / "finetune_0" / "0"
        shard.mkdir(parents=True)
        (shard / f"{0:020d}.jsonl").write_text('{"type": "nonsense"}\n{"type": "nonsense"}\n', encoding="utf-8")
        with run.started():
            assert run.wait(PROCESS_LIMIT_S) == 1
    assert "StreamError" in run.stderr and str(shard) in run.stderr
