"""A run whose groups are all filtered ends with its passes over the problems, completely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.random_model import save_random_model
from fakes.scoring_run import ScoringServer, end_run, logs_of, start_run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"schedule": "conventional", "steps_per_generation": 3}, {"streams": {"backend": "redis"}}],
    ids=["pipeline", "conventional", "redis"],
)
def test_a_run_ends_with_its_passes_though_nothing_can_be_trained(tmp_path: Path, overrides: dict[str, object]) -> None:
    model = save_random_model(tmp_path / "model")
    # Every answer of the task has the same reward.
    finetune = {"max_epochs": 1, "rl": {"filter_zero_advantage_groups": True}}
    with ScoringServer() as server:
        launcher = start_run(tmp_path, model, server, finetune=finetune, **overrides)
        assert end_run(launcher, 600) == 0, logs_of(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("completed", 0, 0)
    assert summary["success_after"] is not None, "the last evaluation was made"
    assert (tmp_path / "run" / "finetune" / "current" / "config.json").exists()
