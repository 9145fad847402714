"""Generation far faster than training, and far slower: the run ends by itself and the servers get every version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.random_model import save_random_model
from fakes.scoring_run import ScoringServer, end_run, logs_of, start_run

from pipelinerl.config.resources import FileStreams
from pipelinerl.records import TrainerMessage, WeightUpdateSuccess
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub

STEPS = 6


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("token_delay_s", "keys"),
    [
        pytest.param(0.0, {"max_lag": None}, id="faster, unbounded"),
        pytest.param(0.0, {"max_lag": 8}, id="faster, bounded"),
        pytest.param(0.2, {"max_lag": 8}, id="slower"),
        pytest.param(0.2, {"max_lag": 0}, id="slower, on-policy"),
    ],
)
def test_l6_the_run_ends_by_itself_and_every_update_is_delivered(
    tmp_path: Path, token_delay_s: float, keys: dict[str, Any]
) -> None:
    model = save_random_model(tmp_path / "model")
    with ScoringServer(token_delay_s=token_delay_s) as server:
        launcher = start_run(
            tmp_path,
            model,
            server,
            finetune={"max_train_steps": STEPS},
            **keys,
        )
        assert end_run(launcher, 800) == 0, logs_of(tmp_path)
        assert server.version == str(STEPS)
    files = RunDir(tmp_path / "run")
    summary = json.loads(files.summary_file.read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    hub = StreamHub(FileStreams(), files)
    messages = hub.reader("trainer", "finetune_0", TrainerMessage).read(10)
    versions = [entry.record.version for entry in messages if isinstance(entry.record, WeightUpdateSuccess)]
    assert versions == list(range(STEPS + 1))
