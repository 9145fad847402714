"""Which W&B run a start belongs to, and the line that says where its numbers are."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import WandbConfig
from pipelinerl.rundir.layout import RunDir, RunIdentity
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.tracking.wandb_sink import WandbSink, first_line, tracked_run


def identity(start: int, run_id: str = "math-0a1b2c3d") -> RunIdentity:
    return RunIdentity(run_id=run_id, incarnation=start)


def config(root: Path, **wandb: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(root), "wandb": wandb})


def test_a_resumed_run_goes_on_in_its_wandb_run() -> None:
    for section, run_id in (({}, "math-0a1b2c3d"), ({"wandb_id": "mine"}, "mine")):
        assert [tracked_run(WandbConfig(**section), identity(start)) for start in (0, 1)] == [run_id, run_id]


def test_ids_are_such_that_wandb_takes_them() -> None:
    run_id = tracked_run(WandbConfig(), identity(0, "a b:c/d#?%é" + "x" * 200 + "-0a1b2c3d"))
    assert run_id is not None and len(run_id) == 100 and run_id.endswith("-0a1b2c3d")
    assert tracked_run(WandbConfig(), identity(0, "a b:é-1")) == "a-b---1"
    assert tracked_run(WandbConfig(), None) is None


@pytest.mark.parametrize(
    ("section", "cause"),
    [
        ({"mode": "disabled"}, "wandb.mode=disabled"),
        ({"mode": "online"}, None),
    ],
)
def test_the_first_line_says_why_it_is_off(tmp_path: Path, section: dict[str, Any], cause: str | None) -> None:
    line = first_line(config(tmp_path, **section), tmp_path)
    assert (line is None) == (cause is None) and (cause or "") in (line or "")


def test_the_address_of_an_online_run_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = types.SimpleNamespace(url="https://wandb.example/p/runs/1", define_metric=lambda *a, **k: None)
    fake = types.SimpleNamespace(
        Settings=dict,
        setup=lambda: types.SimpleNamespace(settings=types.SimpleNamespace(base_url="")),
        init=lambda **arguments: run,
        teardown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    WandbSink(SinkInputs(config(tmp_path, mode="online"), RunDir(tmp_path), 0.0))
    assert capsys.readouterr().err == "W&B: https://wandb.example/p/runs/1\n"
