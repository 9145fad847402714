"""`samples --evaluation`: which rollouts of evaluations are shown, and as what; an evaluation that was made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import evaluation_result, evaluation_sample, rollout_summary

from pipelinerl.__main__ import main
from pipelinerl.records import (
    EvaluationResult,
    EvaluationRollout,
    VersionSpan,
)


def rollout(run: RecordedRun, due: int, index: int, incarnation: int = 0, **fields: Any) -> EvaluationRollout:
    """Rollout 0 fails, 1 has no success and reward -`due`, 2 succeeds with reward `due`; each asks `q<index>`."""
    group = f"evaluation-{incarnation}-{due}"
    name = f"{group}/r{index}"
    values: dict[str, Any] = {"failure": "rollout_timeout", "message": f"{name} took more than 600 s"}
    if index:
        reward = float(due if index == 2 else -due)
        ids, answer = run.ids(f"<|user|>q{index}<|end|><|assistant|>"), run.ids(f"a{due}<|end|>")
        values = {
            "summary": rollout_summary(name, reward, success=index == 2, latency_s=0.5),
            "min_version": due,
            "max_version": due + 1,
            "samples": [
                evaluation_sample(
                    f"{name}/s0",
                    ids,
                    answer,
                    reward=reward,
                    version_spans=[VersionSpan(due, 0, 1), VersionSpan(due + 1, 1, len(answer))],
                )
            ],
        }
    values = {
        "problem": f'{{"question": "q{index}"}}',
        "problem_id": f"p{index}",
        "dataset_name": "held_out",
        "is_final": False,
        "incarnation": incarnation,
        **values,
        **fields,
    }
    return EvaluationRollout(id=name, group_id=group, due_version=due, **values)


def write(run: RecordedRun, rollouts: list[EvaluationRollout], results: list[EvaluationResult]) -> None:
    run.write(*rollouts, topic="evaluation_rollouts", kind=EvaluationRollout)
    run.write(*results, topic="evaluation", kind=EvaluationResult)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = RecordedRun(tmp_path_factory.mktemp("recorded"), test_dataset_names=["held_out"])
    run.write(*run.plain_groups(2))
    write(
        run,
        [rollout(run, due, index) for due in (0, 50, 100) for index in range(3)],
        [evaluation_result(0, 0.5), evaluation_result(50, 0.5)],
    )
    return run


def shown(run: RecordedRun, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["samples", str(run.root), "--evaluation", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def names(text: str) -> list[str]:
    return [line.split(":")[0].removeprefix("rollout evaluation-") for line in text.splitlines() if "rollout e" in line]


def test_a_rollout_with_its_problem_turns_versions_and_result(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(run, capsys, "--version", "50", "--last", "1").splitlines()
    text = "\n".join(lines)
    for part in ("evaluation-0-50/r2", "held_out", "p2", "50..51", '{"question": "q2"}', "reward 50"):
        assert part in text
    assert lines[-1] == "  > a50<|end|>"


def test_options_choose(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(shown(run, capsys)) == ["0-100/r0", "0-100/r1", "0-100/r2"]
    assert names(shown(run, capsys, "--first", "1")) == ["0-0/r0"]
    assert names(shown(run, capsys, "--version", "50", "--no-success")) == ["0-50/r0", "0-50/r1"]
    assert names(shown(run, capsys, "--failed", "--last", "9")) == ["0-0/r0", "0-50/r0", "0-100/r0"]
    assert names(shown(run, capsys, "--worst", "2")) == ["0-100/r1", "0-50/r1"]
    assert names(shown(run, capsys, "--best", "--version", "0")) == ["0-0/r2", "0-0/r1"]
    assert names(shown(run, capsys, "--group", "evaluation-0-50")) == ["0-50/r0", "0-50/r1", "0-50/r2"]
    assert names(shown(run, capsys, "--group", "evaluation-0-50/r1")) == ["0-50/r1"]
    assert names(shown(run, capsys, "--group", "evaluation-0-50/r1/s0")) == ["0-50/r1"]
    assert names(shown(run, capsys, "--dataset", "held_out", "--last", "1")) == ["0-100/r2"]
    assert main(["samples", str(run.root), "--last", "9"]) == 0
    assert "evaluation-" not in capsys.readouterr().out, "rollouts of training stay those of training"


def test_json_says_that_nothing_is_trained(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _, won = (
        json.loads(line) for line in shown(run, capsys, "--json", "--group", "evaluation-0-100").splitlines()
    )
    assert (failed["failure"], failed["sample_id"], failed["reward" if "reward" in failed else "rollout_reward"]) == (
        "rollout_timeout",
        None,
        None,
    )
    assert (won["due_version"], won["is_final"], won["has_result"], won["success"]) == (100, False, False, True)
    assert won["text"] == "<|user|>q2<|end|><|assistant|>a100<|end|>"
    assert [turn["trained"] for turn in won["turns"]] == [False, False] and won["trained_tokens"] == 0
    assert (won["masked_tokens"], won["fate"], won["problem"]) == (0, "not trained", '{"question": "q2"}')


def test_o2_an_evaluation_that_was_cut_off_is_marked_until_it_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(tmp_path)
    write(run, [rollout(run, 50, 1)], [evaluation_result(0, 0.5)])
    assert "NO RESULT of this evaluation" in shown(run, capsys)
    write(run, [rollout(run, 50, 1, incarnation=1), rollout(run, 50, 2, incarnation=1)], [])
    both = shown(run, capsys, "--version", "50")
    assert names(both) == ["0-50/r1", "1-50/r1", "1-50/r2"] and both.count("NO RESULT") == 3
    write(run, [], [evaluation_result(50, 0.5, incarnation=1)])
    once = shown(run, capsys, "--version", "50")
    assert names(once) == ["1-50/r1", "1-50/r2"] and "NO RESULT" not in once
    assert "NO RESULT" in shown(run, capsys, "--group", "evaluation-0-50"), "asked for by name it is there"


def test_a_text_without_ids_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path)
    whole = rollout(run, 3, 2)
    import msgspec

    bare = msgspec.structs.replace(
        whole.samples[0], input_ids=[], labels=[], version_spans=[], prompt_text="2+2?", output_text="4\x1b[2J"
    )
    write(run, [msgspec.structs.replace(whole, samples=[bare])], [evaluation_result(3, 0.5)])
    text = shown(run, capsys)
    assert "  | 2+2?\n" in text and "  > 4\\x1b[2J" in text and "removed" not in text and "MASKED" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--version", "7"], "--version: got '7'"),
        (["--dataset", "train"], "--dataset: got 'train'"),
        (["--group", "0-1"], "--group: got '0-1'"),
        (["--failed", "--group", "evaluation-0-50/r1"], "--group --failed: got 'evaluation-0-50/r1'"),
    ],
)
def test_what_is_not_there_is_one_line(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["samples", str(run.root), "--evaluation", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actor": {"recorded_test_samples": 0}}, "actor.recorded_test_samples=0"),
        ({}, "The run has no test_dataset_names"),
        ({"test_dataset_names": ["test"]}, "It ended before"),
    ],
)
def test_a_run_without_any_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], message: str
) -> None:
    run = RecordedRun(tmp_path, **keys)
    assert main(["samples", str(run.root), "--evaluation"]) == 2
    assert message in capsys.readouterr().err
