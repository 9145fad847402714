"""Which evaluated version is kept as the best one: values, ties, failures, crashes between any two steps."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.short_sample import evaluation_result

from pipelinerl.finetune import best_model
from pipelinerl.finetune.best_model import BestModel, EvaluatedVersion
from pipelinerl.records import EvaluationResult


def result(due: int, value: float = 0.5, **fields: Any) -> EvaluationResult:
    own = {"max_version": due + 1, "num_rollouts": 10, "mean_reward": -value, "metrics": {"length": 10 * value}}
    return evaluation_result(due, value, **{**own, **fields})


def export(root: Path, version: int, due: int | None = None, incarnation: int = 0) -> Path:
    folder = root / "evaluated" / str(version)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of {version}")
    note = EvaluatedVersion(version=version, due_version=version if due is None else due, incarnation=incarnation)
    (folder / "evaluation.json").write_bytes(msgspec.json.encode(note))
    return folder


def best_of(root: Path) -> str | None:
    link = root / "best"
    return (link / "model.safetensors").read_text().removeprefix("weights of ") if link.exists() else None


def left(root: Path) -> set[str]:
    return {path.name for path in (root / "evaluated").iterdir()}


def model(root: Path, metric: str = "success_rate") -> BestModel:
    return BestModel(root, metric, max_failure_rate=0.5)


def test_the_highest_value_is_kept_and_of_equal_ones_the_first(tmp_path: Path) -> None:
    best = model(tmp_path)
    seen = []
    for version, value in ((0, 0.2), (10, 0.6), (20, 0.6), (30, 0.1), (40, 0.7)):
        export(tmp_path, version)
        best.settle([result(version, value)])
        seen.append((best_of(tmp_path), left(tmp_path)))
    assert seen == [("0", {"0"}), ("10", {"10"}), ("10", {"10"}), ("10", {"10"}), ("40", {"40"})]
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text()) == {
        "version": 40,
        "due_version": 40,
        "incarnation": 0,
        "metric": "success_rate",
        "value": 0.7,
        "num_rollouts": 10,
        "num_failed": 0,
        "min_version": 40,
        "max_version": 41,
        "dataset_name": "test",
    }
    assert os.readlink(tmp_path / "best") == "evaluated/40", "a run directory may be moved"


def test_of_equal_values_the_one_of_fewer_versions_is_kept(tmp_path: Path) -> None:
    """Beside training, later versions have a part in what is measured; at the end none has."""
    best = model(tmp_path)
    for version, last, kept in ((10, 14, "10"), (20, 24, "10"), (30, 30, "30"), (40, 40, "30")):
        export(tmp_path, version)
        best.settle([result(version, 1.0, max_version=last)])
        assert best_of(tmp_path) == kept


@pytest.mark.parametrize(("metric", "kept"), [("success_rate", "2"), ("mean_reward", "1"), ("length", "2")])
def test_any_metric_of_evaluations_can_decide(tmp_path: Path, metric: str, kept: str) -> None:
    best = model(tmp_path, metric)
    for version in (1, 2):
        export(tmp_path, version)
        best.settle([result(version, 0.1 * version)])
    assert best_of(tmp_path) == kept


def test_a_metric_that_there_is_not_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        model(tmp_path, "succes").settle([result(1)])
    assert "finetune.keep_best=succes" in caplog.text and "success_rate, mean_reward, length" in caplog.text
    assert best_of(tmp_path) is None and left(tmp_path) == set()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"num_failed": 6}, id="most rollouts failed"),
        pytest.param({"min_version": 11, "max_version": 12}, id="it began late, with other weights"),
    ],
)
def test_an_evaluation_that_did_not_measure_it_does_not_count(tmp_path: Path, fields: dict[str, Any]) -> None:
    best = model(tmp_path)
    export(tmp_path, 0)
    best.settle([result(0, 0.1)])
    export(tmp_path, 10)
    best.settle([result(10, 0.9, **fields)])
    assert best_of(tmp_path) == "0" and left(tmp_path) == {"0"}


def test_of_several_data_sets_all_together_count(tmp_path: Path) -> None:
    best = model(tmp_path)
    export(tmp_path, 0)
    best.settle(
        [result(0, 0.4, dataset_name="all"), result(0, 0.9, dataset_name="a"), result(0, 0.1, dataset_name="b")]
    )
    assert best.best is not None and (best.best.value, best.best.dataset_name) == (0.4, "all")
    export(tmp_path, 10)
    # Failed rollouts do not name their data set; it is the same number of problems.
    best.settle([result(10, 0.3, dataset_name="test")])
    assert best_of(tmp_path) == "0"


def test_at_most_two_candidates_wait_and_those_that_were_passed_over_go(tmp_path: Path) -> None:
    best = model(tmp_path)
    for version in (10, 20, 30):
        best.make_room()
        export(tmp_path, version)
    assert left(tmp_path) == {"10", "30"}, "10 is being measured, and the next evaluation will be that of 30"
    best.settle([result(10, 0.3)])
    assert (best_of(tmp_path), left(tmp_path)) == ("10", {"10", "30"})
    best.make_room()
    export(tmp_path, 40)
    best.settle([result(40, 0.2)])
    assert (best_of(tmp_path), left(tmp_path)) == ("10", {"10"})


def test_an_evaluation_that_failed_altogether_gives_way_to_the_next_one(tmp_path: Path) -> None:
    """20 is being measured when 30 is exported: it must not go for 10, whose evaluation came to nothing."""
    best = model(tmp_path)
    for version in (10, 20):
        best.make_room()
        export(tmp_path, version)
    failed = result(10, num_failed=10, mean_reward=None, metrics={})
    best.settle([msgspec.structs.replace(failed, success_rate=None)])
    assert left(tmp_path) == {"20"}
    best.make_room()
    export(tmp_path, 30)
    best.settle([result(20, 0.8)])
    assert (best_of(tmp_path), left(tmp_path)) == ("20", {"20", "30"})


def test_the_final_evaluation_counts_where_one_due_at_the_same_version_failed_altogether(tmp_path: Path) -> None:
    """Where passes end training. The launcher takes all results behind the trainer's end, from the first one on."""
    export(tmp_path, 20)
    failed = msgspec.structs.replace(result(20, num_failed=10, mean_reward=None, metrics={}), success_rate=None)
    launcher = model(tmp_path)
    launcher.settle([failed, result(20, 0.8, max_version=20, is_final=True)])
    launcher.drop_rest()
    assert best_of(tmp_path) == "20"


class Crash(Exception):
    pass


@pytest.mark.parametrize("step", ["write_note", "point_link", "remove_folder"])
def test_a_crash_between_any_two_steps_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before each step of the change from version 10 to 20; the next start folds all results again."""
    results = [result(10, 0.3), result(20, 0.8), result(30, 0.1)]
    export(tmp_path, 10)
    model(tmp_path).settle(results[:1])
    export(tmp_path, 20)

    def crash(*arguments: object) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(best_model, step, crash)
        with pytest.raises(Crash):
            model(tmp_path).settle(results[:2])
    assert best_of(tmp_path) == ("20" if step == "remove_folder" else "10")
    (tmp_path / "evaluated" / ".partial-30").mkdir()
    best = model(tmp_path)
    best.settle(results)
    best.drop_rest()
    assert (best_of(tmp_path), left(tmp_path)) == ("20", {"20"})
    assert best.best is not None and best.best.value == 0.8


def test_a_full_disk_at_the_change_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best = model(tmp_path)
    export(tmp_path, 10)
    best.settle([result(10, 0.3)])
    export(tmp_path, 20)

    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(best_model, "write_note", full)
        best.settle([result(20, 0.8)])
    assert best_of(tmp_path) == "10" and "finetune.keep_best=null" in caplog.text and "No space" in caplog.text
    again = model(tmp_path)
    again.settle([result(10, 0.3), result(20, 0.8)])
    assert best_of(tmp_path) == "20", "the next start makes up for it"


def test_a_candidate_of_an_earlier_start_is_settled_by_its_own_result_alone(tmp_path: Path) -> None:
    export(tmp_path, 10, incarnation=0)
    best = model(tmp_path)
    best.settle([result(10, 0.9, incarnation=1)])
    assert best_of(tmp_path) is None
    best.settle([result(10, 0.4, incarnation=0)])
    assert best.best is not None and best.best.value == 0.4


def test_another_metric_in_a_later_start_compares_like_with_like(tmp_path: Path) -> None:
    results = [result(10, 0.3, mean_reward=5.0), result(20, 0.2, mean_reward=4.0)]
    export(tmp_path, 10)
    model(tmp_path).settle(results[:1])
    export(tmp_path, 20)
    model(tmp_path, "mean_reward").settle(results)
    assert best_of(tmp_path) == "10", "5 against 4, not against 0.3"
    export(tmp_path, 30)
    model(tmp_path, "mean_reward").settle([*results, result(30, 0.1, mean_reward=1.0, dataset_name="other")])
    assert best_of(tmp_path) == "30", "values of other problems say nothing"


def test_what_is_no_export_is_passed_over(tmp_path: Path) -> None:
    folder = export(tmp_path, 10)
    (folder / "evaluation.json").write_bytes(b"{")
    os.symlink("evaluated/77", tmp_path / "best")
    best = model(tmp_path)
    assert (best.candidates, best.best) == ([], None)
    export(tmp_path, 20)
    best.settle([result(20)])
    assert best_of(tmp_path) == "20"
    assert msgspec.json.decode((tmp_path / "best" / "evaluation.json").read_bytes())["version"] == 20


def test_what_another_process_has_just_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher and trainer of different nodes settle the same result, one between the other's looks at the folders."""
    results = [result(10, 0.3), result(20, 0.8)]
    export(tmp_path, 10)
    trainer = model(tmp_path)
    trainer.settle(results[:1])
    export(tmp_path, 20)
    decide = trainer._why_not

    def late(*arguments: Any) -> str | None:
        model(tmp_path).settle(results)
        return decide(*arguments)

    monkeypatch.setattr(trainer, "_why_not", late)
    trainer.settle(results)
    assert (best_of(tmp_path), left(tmp_path)) == ("20", {"20"})
