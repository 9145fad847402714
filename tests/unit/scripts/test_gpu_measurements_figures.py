"""Figures of measurements, from files as the scripts and pytest write them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from fakes.script_module import load_script


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    load_script("benchmark_splits_figures", monkeypatch)
    return load_script("gpu_measurements_figures", monkeypatch)


def test_a_schedule_and_why_another_failed(figures: ModuleType, tmp_path: Path) -> None:
    spread = {"samples_per_s": {"median": 115.0}, "ess": {"median": 0.9}, "seconds_to_success": {"median": None}}
    (tmp_path / "result.json").write_text(json.dumps({"results": {"high": {"pipeline": spread}}}))
    assert figures.figures_of("schedules", tmp_path) == {"samples/s": 115.0, "ESS": 0.9}
    failed = {"results": {"high": {"pipeline": {"failed": ["seed 1: not done after 300 s: a line"]}}}}
    (tmp_path / "result.json").write_text(json.dumps(failed))
    assert figures.figures_of("schedules", tmp_path) == {"error": "seed 1: not done after 300 s: a line"}


def test_a_split_in_milliseconds(figures: ModuleType, tmp_path: Path) -> None:
    row = {"split": "3servers-1rank", "update_s": {"pause": 0.0125, "transfer": 0.5, "load": None}, "paused_ms": 61.0}
    (tmp_path / "result.json").write_text(
        json.dumps({"splits": [{**row, "cards_peak_gib": {"0": 3.0}, "error": None}]})
    )
    found = figures.figures_of("splits", tmp_path)
    assert (found["pause ms"], found["transfer ms"], found["load ms"], found["paused ms"]) == (12.5, 500.0, None, 61.0)
    assert found["cards GiB"] == {"0": 3.0} and "error" not in found


def test_servers_are_named_by_what_differs(figures: ModuleType, tmp_path: Path) -> None:
    settings = {name: {"held": "64", "rank": rank} for name, rank in (("a", 0), ("b", 16), ("c", 32))}
    results = {
        name: {"lean, with log-probs": {"tokens/s": {"median": rate}}} for name, rate in (("a", 9.0), ("b", 6.0))
    }
    (tmp_path / "result.json").write_text(json.dumps({"settings": settings, "results": results}))
    assert figures.figures_of("server", tmp_path) == {
        "rank 0 lean, with log-probs: tokens/s": 9.0,
        "rank 16 lean, with log-probs: tokens/s": 6.0,
    }


def test_tests_that_passed_and_those_that_did_not(figures: ModuleType, tmp_path: Path) -> None:
    cases = '<testcase name="a"/><testcase name="b[1]"><failure message="x"/></testcase>'
    cases += '<testcase name="c"><skipped/></testcase><testcase name="d"><error message="y"/></testcase>'
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert figures.figures_of("tests", tmp_path) == {"passed": 1, "skipped": 1, "failed": 2, "which": "b[1] d"}


def test_a_curve_has_evaluations_at_the_steps_whose_weights_they_measure(figures: ModuleType) -> None:
    """The one of step 2 ends behind step 3; one without its step has seconds of its own."""
    key, entropy = "evaluation/test/success_rate", "rl/entropy_estimate"
    rows = [{"time": 100.0, "step": 0, "source": "weight_update"}, {"time": 101.0, "step": 0, key: 0.1}]
    rows += [{"time": 102.0 + n, "step": n, "finetune/step_s": 1.0, entropy: 2.0 - n} for n in (1, 2, 3)]
    rows += [{"time": 105.5, "step": 2, key: 0.3}, {"time": 106.0, "step": 3, "preprocessor/x": 1.0}]
    assert [(row["step"], row["seconds"], row[key], row[entropy]) for row in figures.curve_of(rows)] == [
        (0, 1.0, 0.1, None),
        (1, 3.0, None, 1.0),
        (2, 4.0, 0.3, 0.0),
        (3, 5.0, None, -1.0),
    ]
    assert figures.curve_of(rows[1:]) == []


@pytest.mark.parametrize("kind", ["run", "schedules", "server", "splits", "tests"])
def test_what_ended_before_it_wrote_anything_has_no_figures(figures: ModuleType, tmp_path: Path, kind: str) -> None:
    assert figures.figures_of(kind, tmp_path) in ({}, {"steps": 0})
    (tmp_path / "result.json").write_text('{"results": {"hi')
    assert figures.figures_of(kind, tmp_path) in ({}, {"steps": 0})
