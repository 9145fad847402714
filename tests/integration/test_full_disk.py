"""A disk that takes no more: a stream or a training state that cannot be written ends the run, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.random_model import save_random_model
from fakes.scoring_run import ScoringServer, end_run, logs_of, start_run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("limit_bytes", "keys", "place"),
    [
        pytest.param(60_000, {"save_checkpoint_steps": 100_000}, "streams", id="stream"),
        pytest.param(300_000, {"save_checkpoint_steps": 1}, "finetune", id="training state"),
    ],
)
def test_o1_what_cannot_be_written_is_a_clean_stop(
    tmp_path: Path, limit_bytes: int, keys: dict[str, Any], place: str
) -> None:
    model = save_random_model(tmp_path / "model")
    with ScoringServer() as server:
        launcher = start_run(tmp_path, model, server, limit_bytes, finetune={"max_train_steps": 10_000, **keys})
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert end_run(launcher, 800) == 1, logs_of(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "File too large" in summary["reason"] and place in summary["reason"], summary["reason"]
    _, left = psutil.wait_procs(children, timeout=60)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
