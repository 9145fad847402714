"""Word problems in the format of GSM8K: their arithmetic, and what the math domain makes of the files."""

from __future__ import annotations

import json
import re
from operator import add, floordiv, mul, sub
from pathlib import Path

import pytest
from fakes.script_module import load_script

from pipelinerl.domains.math import load_problems, validate

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    with pytest.MonkeyPatch.context() as patch:
        script = load_script("word_problems", patch)
        patch.setattr("sys.argv", ["word_problems.py", str(folder), "--train", "400", "--test", "60"])
        script.main()
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_step_is_right_and_the_last_one_is_the_answer(folder: Path) -> None:
    for row in rows(folder / "train.jsonl"):
        *lines, last = row["answer"].split("\n")
        for line in lines:
            found = STEP.fullmatch(line)
            assert found is not None and found[1] == found[4] and found[3] == found[6] and found[7] == found[8]
            assert OPERATORS[found[2]](int(found[1]), int(found[3])) == int(found[7])
            assert found[2] != "/" or int(found[1]) % int(found[3]) == 0
        assert last == f"#### {found[7]}" and int(found[7]) > 0


def test_no_question_is_in_both_files(folder: Path) -> None:
    questions = [row["question"] for name in ("train", "test") for row in rows(folder / f"{name}.jsonl")]
    assert len(questions) == len(set(questions)) == 460


def test_the_math_domain_reads_them(folder: Path) -> None:
    problems = load_problems([str(folder / "test.jsonl")])
    assert len(problems) == 60
    assert problems[0]["answer"] == rows(folder / "test.jsonl")[0]["answer"].rpartition("#### ")[2]
    assert validate(problems[0]) == 1
