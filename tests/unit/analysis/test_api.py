"""Runs from Python: what `Run` reads, and what `train` and `evaluate` raise."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import evaluation_result

import pipelinerl
from pipelinerl import api
from pipelinerl.errors import ConfigError, PipelineRLError, UserError
from pipelinerl.records import EvaluationResult
from pipelinerl.tracking.health import Finding, add_finding

METRICS = [
    {"time": 1.0, "step": 1, "source": "finetune_0", "finetune/grad_norm": 2.0},
    {"time": 1.5, "step": 1, "source": "preprocessor_0", "preprocessor/reward_mean": 0.25},
    {"time": 2.0, "step": 2, "source": "preprocessor_0", "preprocessor/reward_mean": 0.75},
    {"time": 2.5, "step": 2, "source": "preprocessor_0", "preprocessor/reward_mean": 0.5},  # after a resume
]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """With two groups of training, an evaluation, metrics of two steps, a finding, and no pandas."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find_spec(name))
    run = RecordedRun(tmp_path)
    run.write(*run.plain_groups(2, first=1))
    result = evaluation_result(0, 0.5)
    run.write(result, topic="evaluation", kind=EvaluationResult)
    text = "".join(json.dumps(each) + "\n" for each in METRICS)
    run.files.metrics_file.write_text(text + '{"time": 3.0, "step": 3, "sou')
    finding = Finding(name="entropy_collapse", step=2, evidence="<b>entropy</b> fell", advice="raise it")
    add_finding(run.files.findings_file, finding)
    return run


def test_a_run_as_tables(recorded: RecordedRun) -> None:
    run = pipelinerl.Run(recorded.root)
    assert (run.path, run.is_running, run.summary, run.model) == (recorded.root, False, None, None)
    assert run.metrics() == [
        {"time": 1.5, "step": 1, "finetune/grad_norm": 2.0, "preprocessor/reward_mean": 0.25},
        {"time": 2.5, "step": 2, "preprocessor/reward_mean": 0.5},
    ]
    (evaluation,) = run.evaluations()
    assert (evaluation["dataset_name"], evaluation["success_rate"]) == ("test", 0.5)
    assert [each.name for each in run.findings] == ["entropy_collapse"]
    best, *others = run.samples(1, "best")
    assert not others and best["rollout_id"] == "0-2/r0" and best["reward"] == 2.0 and best["fate"] == "pending"
    assert [turn["text"] for turn in best["turns"]] == ["<|user|>q2<|end|><|assistant|>", "2.0<|end|>"]
    assert len(run.samples(None)) == 4
    assert {row["group_id"] for row in run.samples(version=1)} == {"0-1"}
    with pytest.raises(ConfigError):
        run.samples(step=1, evaluation=True)


def test_tables_are_data_frames_where_pandas_is(recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas")
    run = pipelinerl.Run(recorded.root)
    metrics = run.metrics()
    assert isinstance(metrics, pandas.DataFrame) and list(metrics["step"]) == [1, 2]
    assert metrics["finetune/grad_norm"].isna().tolist() == [False, True]
    assert run.samples()["reward"].sum() == 0.0


def test_a_notebook_shows_numbers_and_curves_and_no_foreign_html(recorded: RecordedRun) -> None:
    recorded.files.summary_file.write_text(json.dumps({"status": "failed", "reason": "<script>", "steps": 2}))
    html = pipelinerl.Run(recorded.root)._repr_html_()
    assert "reward 0.25 to 0.5, now 0.5" in html and html.count("<polyline") == 1
    assert "<script" not in html and "<b>entropy" not in html and "&lt;script&gt;" in html


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run directory"):
        pipelinerl.Run(tmp_path)


def test_a_refused_start_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--config-name: got 'quickstrat'.*Did you mean 'quickstart'"):
        pipelinerl.train("quickstrat", output_dir=tmp_path / "it's here")
    assert "Did you mean 'quickstart'" in capsys.readouterr().out
    with pytest.raises(UserError, match="nothing_here"):
        pipelinerl.evaluate(tmp_path / "nothing_here", k=2)


@pytest.mark.parametrize(
    ("program", "code", "error", "reason"),
    [
        ("print('step 1'); print('error: the run failed: actor_0 died\\nits log', flush=True)", 1, PipelineRLError,
         "the run failed: actor_0 died\nits log"),
        ("print('usage: launch'); raise SystemExit('launch: no such thing')", 1, PipelineRLError,
         "launch: no such thing"),
        ("", 2, UserError, "launch ended with exit code 2 and no output"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, code: int, error: type[Exception], reason: str
) -> None:
    popen = subprocess.Popen
    program = f"{program}\nraise SystemExit({code})"

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        assert command[:4] == [sys.executable, "-m", "pipelinerl", "launch"]
        return popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(error) as raised:
        pipelinerl.train(output_dir=tmp_path)
    assert (type(raised.value), str(raised.value)) == (error, reason)


def test_a_notebook_shows_the_run_while_it_goes_on(recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    display = SimpleNamespace(display=lambda run, display_id: shown.append(run) or SimpleNamespace(update=shown.append))
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(api, "_REDRAW_S", 0.0)
    popen = subprocess.Popen
    program = "print('step 1'); print('step 2')"
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", program], **options)
    )
    run = pipelinerl.train(output_dir=recorded.root)
    # After each line, and at the end.
    assert [each.path for each in shown] == [run.path] * 3


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, pipelinerl; sys.exit(any(name.startswith('pipelinerl.') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
