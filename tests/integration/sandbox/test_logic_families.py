"""Every family of reasoning-gym: our grade is the score of the package's own scorer, on its own examples and others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from pipelinerl.domains.logic import is_harmless, load_problems, verify_logic
from pipelinerl.sandbox.protocol import Grade

# A number, a grid, one whose examples differ every time, and two whose scorers evaluate what they are given.
FEW = ("leg_counting", "sokoban", "list_functions", "countdown", "number_sorting")
# A mix of other families.
MIXED = ("composite",)
FAMILIES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(DATASETS)
    if name not in MIXED
]


def test_there_are_many() -> None:
    assert len(FAMILIES) > 90


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grade_is_the_score_of_the_family(family: str) -> None:
    problems = load_problems(["train"], families=[family], num_train=2, num_test=1)
    data = reasoning_gym.create_dataset(family, seed=0, size=2)
    # What cannot be made again is in the problem.
    entries = [problem.get("entry", data[index]) for index, problem in enumerate(problems)]
    golds = [None if entry["answer"] is None else str(entry["answer"]) for entry in entries]
    for index, problem in enumerate(problems):
        assert problem["question"] == str(entries[index]["question"])
        for text in ("zebra", "7", *filter(None, golds)):
            check_one(family, text, problem, data, entries[index])
        if golds[index] is not None:
            assert verify_logic(f"<answer>{golds[index]}</answer>", problem) == Grade(1.0, "correct")


def check_one(family: str, text: str, problem: dict[str, Any], data: Any, entry: Any) -> None:
    grade = verify_logic(f"thinking <answer>{text}</answer>", problem)
    try:
        score = float(data.score_answer(text.strip(), entry))
    except Exception:  # noqa: BLE001 - what the package cannot read is no answer
        assert grade == Grade(0.0, "unparsable")
        return
    if is_harmless(family, text):
        assert grade.score == pytest.approx(score), text
    else:
        assert grade == Grade(0.0, "unparsable")


def test_r1_a_scorer_that_fails_on_its_own_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = load_problems(["train"], families=["leg_counting"], num_train=1)[0]

    def broken(self: Any, answer: str | None, entry: Any) -> float:
        raise RuntimeError("out of order")

    monkeypatch.setattr("reasoning_gym.arithmetic.leg_counting.LegCountingDataset.score_answer", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        verify_logic("<answer>4</answer>", problem)
