"""The table of `docs/reliability.md` names files that hold a test of the line, and the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| ([A-Z]\d) \| [^|]+ \| ([^|]+) \|$", (TESTS.parent / "docs" / "reliability.md").read_text(), re.MULTILINE
)


def test_every_line_has_one_row() -> None:
    lines = [line for line, _ in ROWS]
    assert len(set(lines)) == len(lines)
    expected = {f"{kind}{n}" for kind, count in (("L", 9), ("D", 9), ("O", 6)) for n in range(1, count + 1)}
    assert {*expected, "W2"} <= set(lines)


@pytest.mark.parametrize(("line", "files"), ROWS, ids=[line for line, _ in ROWS])
def test_each_file_holds_a_test_of_the_line(line: str, files: str) -> None:
    for file in re.findall(r"`([^`]+)`", files):
        text = (TESTS / file).read_text()
        assert re.search(rf"def test_([a-z]\d_)*{line.lower()}_", text), f"{file} has no test of line {line}"
