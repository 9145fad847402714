"""The actor as a process, against a scripted server and a trainer that only counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def _set_version(server: FakeServer):
    def set_version(version: int) -> None:
        server.version = str(version)

    return set_version


def test_a_run_from_the_first_weights_to_the_last_evaluation(tmp_path: Path, model: Path) -> None:
    with FakeServer(token_delay_s=0.001) as server:
        run = ActorRun(tmp_path, model, [server.url], server.token)
        with run.started(), CountingTrainer(run, steps=4, on_version=_set_version(server)) as trainer:
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    # On-policy: every trained token of step n was sampled by version n - 1.
    assert len(trainer.batches) == 4
    for step, batch in enumerate(trainer.batches, start=1):
        samples = [sample for group in batch for sample in group.samples]
        assert {(sample.min_version, sample.max_version) for sample in samples} == {(step - 1, step - 1)}
    group = trainer.batches[0][0]
    turns = 1 + int(group.problem_id.removeprefix("train-")) % 3
    assert [sample.id for sample in group.samples] == [f"0-0/r{r}/s{s}" for r in range(2) for s in range(turns)]
    sample = group.samples[0]
    assert sample.input_ids[sample.prompt_tokens :] == [10, 11, 12, 13, 14]
    assert sample.labels == [-100] * sample.prompt_tokens + [10, 11, 12, 13, 14]
    assert sample.logprobs == [-0.5] * 5
    assert (sample.finished, sample.finish_reason) == (False, "length")
    before, after = run.evaluations
    assert (before.due_version, before.is_final, before.min_version, before.max_version) == (0, False, 0, 0)
    assert (after.due_version, after.is_final, after.min_version, after.max_version) == (4, True, 4, 4)
    # Two of the six test problems have one turn.
    assert before.success_rate == pytest.approx(2 / 6)
    assert before.num_rollouts == 6 and before.num_failed == 0 and before.mean_reward == 0.5
    values = run.metrics[-1].values
    assert {"actor/output_tokens_per_s", "actor/server_busy_0", "actor/in_flight_samples"} <= set(values)
