"""T2 in a run: answers whose log-probs cannot be trained on fail their rollouts, are counted, and end the run."""

from __future__ import annotations

from pathlib import Path

from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model


def test_t2_log_probs_that_are_none_are_counted_and_never_trained(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    # What the server writes for NaN and -inf.
    with FakeServer(logprob=-9999.0) as server:
        run = ActorRun(tmp_path, model, [server.url], server.token)

        def set_version(version: int) -> None:
            server.version = str(version)

        with run.started(), CountingTrainer(run, steps=2, on_version=set_version):
            assert run.wait(PROCESS_LIMIT_S) == 1
    assert run.groups == []
    assert {fate.reason for fate in run.fates if fate.fate == "failed"} == {"bad_logprob"}
    assert "bad_logprob" in run.stderr and "log-prob -9999.0" in run.stderr
