"""Mathematical answers that must agree and that must not, and reference answers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.domains import math
from pipelinerl.domains.math import final_answer, verify_math
from pipelinerl.errors import DomainError

#: gold | stated
AGREE = r"""
50 | 50.
\frac{1}{2} | 0.5
\frac12 | \dfrac{1}{2}
1/3 | 0.333333
3.141592654 | 3.1415926536
2\pi | 6.283185
0.3 | 0.1+0.2
1,234 | 1234
10 000 | 10000
1,111,111\text{ dollars} | 1111111
1 1/2 | 3/2
1\frac12 | 1.5
1.6\times10^{-19} | 16\times10^{-20}
1.6\times10^{-19} | 1.6e-19
1.6\times10^{-19} | \frac{16}{10^{20}}
2^{-60} | \frac{1}{2^{60}}
1e22 | 10^{22}
10^{100} | 10^{99}\cdot10
50\% | 0.5
50\% | 50
50 | 50\%
12.5\% | \frac18
2\sqrt2 | \sqrt8
(x+1)^2 | x^2+2x+1
x=5 | 5
5 | x = 5
5\text{ cm} | 5
5\text{ cm} | 5\text{ centimeters}
5\text{ apples} | 5\text{ apple}
90^\circ | 90
101_2 | 101
101_{2} | 101_2
1,2 | 2, 1
\pm 2 | 2,-2
(1,2) | 1,2
\left[0,\infty\right) | [0,\infty)
x>1 | 1<x
A | (A)
AB | \text{AB}
\text{Yes} | \text{yes}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} | \begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}
2\pi r | 2r\pi
3\cdot x | 3x
a \cdot b | b a
\binom{5}{2} | 10
4 | 2\cdot2=4
\emptyset | \varnothing
\emptyset | ∅
\varnothing | \{\}
1/3 | 0.(3)
-\frac13 | -0.\overline{3}
0.1\overline{6} | \frac16
\frac{1}{7} | 0.\overline{142857}
2.\dot{3} | 7/3
1 | 0.(9)
"""
DIFFER = r"""
1.6\times10^{-19} | 9.1\times10^{-31}
x=1.6\times10^{-19} | x=9.1\times10^{-31}
(10^{-19},1) | (10^{-31},1)
\frac{1}{2^{60}} | \frac{1}{3^{60}}
e^{-100} | e^{-200}
0.000001 | 0.0000014
0.0000001 | 0.0000002
0 | 10^{-19}
0 | 1e-9
0.1234567 | 0.1234568
1 | 0.9999999
1.0000001 | 1.0000002
1000000 | 1000000.4
\frac13 | 0.33
\frac13+10^{-20} | \frac13
\pi | 3.14
\sqrt2 | 1.4142
12345678901234567890 | 12345678901234567891
10^{100} | 10^{100}+1
x+10^{-20} | x
10^{-19}x | 10^{-31}x
2 3 | 23
2 3 | 5
1 1/2 | 11/2
1 1/2 | 1
12 | 1,2
1,1,2 | 1,2
2 | 2,2
1,2,3 | 1,2
(1,2) | (2,1)
(1,2) | \{1,2\}
\{1,2\} | (1,2)
[1,2) | (1,2)
\pm2 | 2
5\text{ km} | 5\text{ m}
5\text{ hours} | 5\text{ minutes}
8\pi\text{ cm}^2 | 8\pi\text{ m}^2
4 | 2+3=4
12.5\% | 1.25
50 | 0.5
101_2 | 101_3
AB | BA
\text{ABC} | BCA
\text{Monday} | \text{Tuesday}
A | B
x=1 | y=1
x>1 | x\geq1
x^2+1 | x^2+2
1+2i | 1-2i
\infty | -\infty
\log_2 8 | \log_2 9
\emptyset | 0
\emptyset | \{0\}
0.\overline{3} | 0.3
0.1(6) | 0.(16)
1/3 | -0.(3)
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
"""


def pairs(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.strip().splitlines()]


@pytest.mark.parametrize(("table", "score"), [(AGREE, 1.0), (DIFFER, 0.0)], ids=["agree", "differ"])
def test_pairs_that_must_and_must_not_agree(table: str, score: float) -> None:
    graded = {(gold, said): verify_math(f"\\boxed{{{said}}}", {"answer": gold}).score for gold, said in pairs(table)}
    assert [pair for pair, found in graded.items() if found != score] == []


SOLUTION = r"By symmetry the sum is $100$. So the total is \[\boxed 50.\]"


def test_the_reference_answer_comes_from_its_mark_and_is_not_confirmed_by_itself() -> None:
    problem = math._problem({"task": "q", "solution": SOLUTION})
    assert isinstance(problem, dict) and problem["answer"] == "50"
    assert verify_math(r"\boxed{50}", problem).score == math.validate(problem) == 1.0
    assert verify_math(r"\boxed{100}", problem).score == 0.0
    unmarked = SOLUTION.replace("\\boxed", "")
    assert isinstance(math._problem({"task": "q", "solution": unmarked}), str)
    assert math.validate({"answer": unmarked}) == 0.0
    assert final_answer("#### 1,2") == "1,2" and final_answer("#### 1,002") == "1002"


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    without = '{"problem": "q", "solution": "Add them and see what comes out."}\n'
    file.write_text(without + '{"problem": "q", "answer": 3}\n', encoding="utf-8-sig")
    assert [each["answer"] for each in math.load_problems([str(file)])] == ["3"]
    file.write_text(without)
    with pytest.raises(DomainError, match="final answer"):
        math.load_problems([str(file)])
