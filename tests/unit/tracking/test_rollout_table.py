"""Which rollouts of an evaluation trackers get as a table, and how their texts are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import evaluation_result, evaluation_sample, rollout_summary

from pipelinerl.records import EvaluationRollout, EvaluationSample
from pipelinerl.tracking.rollout_table import MAX_CHARS, RolloutTable, RolloutTables

TOPIC = "evaluation_rollouts"


def rollout(name: str, problem: str, due: int, text: str = "", **fields: Any) -> EvaluationRollout:
    """An attempt at `problem` that returned a text without ids."""
    sample = evaluation_sample(
        f"{name}/s0", [], [], reward=0.5, output_tokens=3, prompt_text=f"what is {problem}?", output_text=text
    )
    values: dict[str, Any] = {
        **{"group_id": "e", "problem": "{}", "is_final": False, "dataset_name": "test", "samples": [sample]},
        **{"summary": rollout_summary(name, 0.5), "min_version": due, "max_version": due},
    }
    return EvaluationRollout(id=name, problem_id=problem, due_version=due, **values | fields)


def tables(run: RecordedRun) -> RolloutTables:
    return RolloutTables(run.streams(), run.files, run.config, "actor_0")


def write(run: RecordedRun, *rollouts: EvaluationRollout) -> None:
    run.write(*rollouts, topic=TOPIC, kind=EvaluationRollout)


def column(table: RolloutTable | None, name: str) -> list[Any]:
    assert table is not None
    return [row[table.columns.index(name)] for row in table.rows]


def test_the_same_problems_are_shown_in_every_evaluation(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, tracking={"rollouts_per_evaluation": 3})
    made = tables(run)
    problems = [f"p{n}" for n in range(20)]
    shown = []
    for due, order in ((0, problems), (5, problems[::-1])):
        attempts = [rollout(f"{due}/r{n}", problem, due) for n, problem in enumerate([*order, *order])]
        write(run, *attempts, rollout("x", "other", due, dataset_name="hard"))
        table = made.table_of(evaluation_result(due))
        assert table is not None and (table.dataset, table.version) == ("test", due)
        shown.append(column(table, "problem"))
        assert column(made.table_of(evaluation_result(due, dataset_name="hard")), "problem") == ["other"]
        assert (
            made.table_of(evaluation_result(due, dataset_name="all")) is None
            and made.table_of(evaluation_result(due, is_final=True)) is None
        )
    assert shown[0] == shown[1] and len(set(shown[0])) == 3


def test_a_row_says_what_happened(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    parts = [("<|user|>2+2<|end|><|assistant|>", False), ("4<|end|>", True)]
    sample = run.sample("e/r0/s0", parts, [3], reward=1.0)
    sampled = EvaluationSample(**{name: getattr(sample, name) for name in sample.__struct_fields__})
    failed: dict[str, Any] = {"samples": [], "summary": None, "min_version": None, "max_version": None}
    write(
        run,
        rollout("e/r0", "a", 3, samples=[sampled], max_version=4),
        rollout("e/r1", "b", 3, **failed, failure="timeout", message="after 9 s"),
    )
    table = tables(run).table_of(evaluation_result(3))
    assert table is not None
    assert table.columns == (
        *("version", "sampled_by", "problem", "prompt", "answer", "reward", "success", "tokens", "end"),
    )
    assert sorted(table.rows, key=lambda row: row[2]) == [
        (3, "3..4", "a", "<|user|>2+2<|end|><|assistant|>", "4<|end|>", 0.5, True, 3, "stop"),
        (3, "", "b", "{}", "timeout: after 9 s", None, None, 0, "failed"),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b>x</b>\n|", "<b>x</b>\n|"),
        ("\x1b[2J\u202e\udc80", "\\x1b[2J\\u202e\\udc80"),
        ("x" * 5000, f"{'x' * 1000}...(3000 characters cut)...{'x' * 1000}"),
    ],
)
def test_texts_are_inert_and_bounded(text: str, shown: str, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    made = tables(run)
    made._keep(rollout("e/r0", "a", 0, text))
    assert column(made.table_of(evaluation_result(0)), "answer") == [shown] and MAX_CHARS == 2000


def test_a_model_without_a_tokenizer_here_has_its_tokens_counted(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    sample = run.sample("e/r0/s0", [("ab", False), ("cde", True)])
    for file in run.model.iterdir():
        file.unlink()
    sampled = EvaluationSample(**{name: getattr(sample, name) for name in sample.__struct_fields__})
    write(run, rollout("e/r0", "a", 0, samples=[sampled]))
    (answer,) = column(tables(run).table_of(evaluation_result(0)), "answer")
    assert answer.startswith(f"({len(run.ids('cde'))} tokens; ")


def test_a_later_start_reads_no_more_than_the_newest_part_of_the_stream(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    write(run, rollout("0/r0", "a", 0))
    later = tables(run)
    write(run, rollout("5/r0", "b", 5))
    assert column(later.table_of(evaluation_result(5)), "problem") == ["b"]
    assert later.table_of(evaluation_result(0)) is None
