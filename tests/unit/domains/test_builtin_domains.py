"""Problems and graders of the built-in domains: splits, gold answers, and grades worked out by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.domains import countdown, counting, fn_calling, ifeval, logic, math
from pipelinerl.domains.answers import boxed_answer, same_value, tagged_answer, whole_number
from pipelinerl.domains.countdown import ExpressionError, evaluate
from pipelinerl.domains.fn_calling import parse_calls
from pipelinerl.domains.ifeval import follows
from pipelinerl.domains.logic import is_harmless
from pipelinerl.domains.math import final_answer
from pipelinerl.errors import DomainError

PROCEDURAL = ("counting", "countdown", "math", "ifeval", "fn_calling", "coding")


@pytest.mark.parametrize("name", PROCEDURAL)
def test_splits_share_no_problem_and_are_the_same_every_time(name: str) -> None:
    module = importlib.import_module(f"pipelinerl.domains.{name}")
    train, test = module.load_problems(["train"]), module.load_problems(["test"])
    assert not {each["id"] for each in train} & {each["id"] for each in test}
    assert len({each["id"] for each in train}) == len(train)
    assert module.load_problems(["train"]) == train
    assert module.load_problems(["train"], seed=1) != train
    with pytest.raises(DomainError, match="nonsense"):
        module.load_problems(["nonsense"])


@pytest.mark.parametrize("name", ["counting", "countdown", "math", "ifeval", "fn_calling", "guessing"])
def test_gold_answers_score_1(name: str) -> None:
    module = importlib.import_module(f"pipelinerl.domains.{name}")
    assert all(module.validate(problem) == 1.0 for problem in module.load_problems(["train", "test"])[::20])


def test_too_few_different_problems_is_said() -> None:
    with pytest.raises(DomainError, match="found only"):
        counting.load_problems(["train"], letters="a", max_length=3, num_train=50)


def test_answers_are_found() -> None:
    """X3: what stands inside thinking is no answer."""
    assert tagged_answer("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert tagged_answer("<think><answer>1</answer></think>") is None
    assert tagged_answer("</answer><answer>") is None
    assert boxed_answer("\\boxed{1} then \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert boxed_answer("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert boxed_answer("\\boxed{1") is None
    assert boxed_answer("\\boxed{4}. So \\boxed{5") == "4"
    assert boxed_answer("the total is \\[\\boxed 50.\\]") == "50"
    assert boxed_answer("<think>Is it \\boxed{4}? No,") is tagged_answer("<think><answer>1</answer>") is None
    assert boxed_answer("<think>4</think>\\boxed{5}<think>or \\boxed{6}") == "5"
    assert [whole_number(text) for text in ("-7", "1,234", "1.5", "", "\u0663")] == [-7, 1234, None, None, None]


def test_counting() -> None:
    problem = {"word": "banana", "letter": "a", "answer": 3}
    statuses = {text: counting.verify_counting(text, problem).status for text in ("<answer>3</answer>", "3")}
    assert statuses == {"<answer>3</answer>": "correct", "3": "no_answer"}
    assert counting.verify_counting("<answer>2</answer>", problem).status == "wrong"
    assert counting.verify_counting("<answer>three</answer>", problem).status == "unparsable"


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("2 + 3 * 4", 14, [2, 3, 4]),
        ("(2 + 3) * 4", 20, [2, 3, 4]),
        ("8 / 3 * 3", 8, [8, 3, 3]),
        ("10 - 2 - 3", 5, [10, 2, 3]),
        ("-(2 - 5)", 3, [2, 5]),
        ("6 \u00d7 7", 42, [6, 7]),
        ("007 + 0 * 00100", 7, [7, 0, 100]),
    ],
)
def test_expressions(text: str, value: int, numbers: list[int]) -> None:
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text", ["", "1 +", "(1", "1)", "2 ** 3", "1/0", "a", "1 2", "1" * 7, "+" * 200, "(" * 2000, "1_0"]
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_countdown() -> None:
    problem = {"numbers": [2, 3, 4], "target": 14}

    def status(text: str) -> str:
        return countdown.verify_countdown(f"<answer>{text}</answer>", problem).status

    assert status("2 + 3*4") == status("4*3 + 2 = 14") == "correct"
    assert status("2 * 7") == status("2 + 3 + 4") == status("(2 + 3*4) * (4 - 3)") == "wrong"


def test_math() -> None:
    """X3: pairs that must agree and pairs that must not."""

    def status(text: str, answer: str) -> str:
        return math.verify_math(text, {"answer": answer}).status

    assert status("so \\boxed{\\frac{1}{2}}", "0.5") == "correct"
    assert status("\\boxed{2\\sqrt{2}}", "\\sqrt{8}") == "correct"
    assert status("\\boxed{1,234}", "1234") == "correct"
    assert status("<answer>42</answer>", "42") == "correct"
    assert status("\\boxed{7}", "8") == "wrong"
    assert status("the answer is 8", "8") == "no_answer"


def test_reference_answers_of_data_sets() -> None:
    assert final_answer("2 + 2 = 4\n#### 1,004") == "1004"
    assert final_answer("Thus \\boxed{\\pi}.") == "\\pi"
    assert final_answer(" 204 ") == "204"


def test_math_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(
        '{"question": "1+1?", "answer": "#### 2"}\n\n{"problem": "x", "solution": "\\\\boxed{3}", "level": 3}\n'
    )
    first, second = math.load_problems([str(file)])
    assert first == {"id": "own-0", "dataset": "own", "task": "1+1?", "answer": "2"}
    assert second["answer"] == "3" and second["difficulty"] == 0.5
    file.write_text('{"question": "x", "answer": "1"}\nnonsense\n')
    with pytest.raises(DomainError, match=r"own\.jsonl:2"):
        math.load_problems([str(file)])
    with pytest.raises(DomainError, match="absent"):
        math.load_problems([str(tmp_path / "absent.jsonl")])
    with pytest.raises(DomainError, match="gsm8k_train"):
        math.load_problems(["gsm8k"])


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DomainError, match=r"openai/gsm8k.*Couldn't reach the hub.*JSONL"):
        math.load_problems(["gsm8k_train"])


@pytest.mark.parametrize(
    ("kind", "arguments", "good", "bad"),
    [
        ("min_words", {"count": 2}, "two words", "one"),
        ("max_words", {"count": 2}, "two words", "now three words"),
        ("keyword", {"word": "sea"}, "The Sea.", "seaside"),
        ("forbidden", {"word": "sea"}, "seaside", "the sea"),
        ("lowercase", {}, "low 1!", "Low"),
        ("uppercase", {}, "UP 1!", "Up"),
        ("no_commas", {}, "a b", "a, b"),
        ("bullets", {"count": 2}, "- a\n- b", "- a\nb"),
        ("paragraphs", {"count": 2}, "a\n\nb", "a\nb"),
        ("starts_with", {"phrase": "so"}, " so it is", "it is so"),
        ("ends_with", {"phrase": "end"}, "the end\n", "the end."),
        ("json", {"keys": ["a"]}, '```json\n{"a": 1}\n```', '{"b": 1}'),
    ],
)
def test_constraints(kind: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(good, kind, arguments) and not follows(bad, kind, arguments) and not follows(" ", kind, arguments)


def test_ifeval_gives_credit_for_some_constraints_if_asked() -> None:
    problem = {"constraints": [{"kind": "lowercase"}, {"kind": "keyword", "word": "sea"}]}
    assert ifeval.verify_ifeval("the river", problem).score == 0.0
    assert ifeval.verify_ifeval("the river", problem, partial=True).score == 0.5


CALL = ("f", {"a": 1})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '{"name": "f", "parameters": {"a": 1}}',
        '[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]',
        'I call:\n```json\n{"name": "f", "arguments": {"a": 1}}\n```',
    ],
)
def test_formats_of_calls(text: str) -> None:
    assert parse_calls(text) == ([CALL], 0)


@pytest.mark.parametrize("text", ['{"name": "f"}', '[{"name": "f"}]', '```json\n{"name": "f"}\n```'])
def test_functions_without_parameters(text: str) -> None:
    assert parse_calls(text) == ([("f", {})], 0)


def test_t7_a_damaged_call_leaves_its_siblings() -> None:
    text = '<tool_call>{"name": "f", "arg</tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert parse_calls(text) == ([CALL], 1)
    assert parse_calls("Nothing to call.") == ([], 0)
    assert parse_calls('{"name": "f", "arg') == ([], 1)
    assert parse_calls('```json\n{"name": 1}\n``` or ```x```') == ([], 2)


def test_values_are_compared_as_json() -> None:
    assert same_value(1, 1.0) and same_value({"a": [" x "]}, {"a": ["x"]}, strip=True)
    assert not same_value(1, True) and not same_value([1], [1, 2]) and not same_value("1", 1)


def test_fn_calling_counts_missing_and_extra_calls() -> None:
    problem = {"expected": [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]}
    f, g = ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "g"}</tool_call>')
    assert fn_calling.verify_fn_calling(g + f, problem).score == 1.0
    assert fn_calling.verify_fn_calling(f, problem).score == 0.0
    assert fn_calling.verify_fn_calling(f, problem, partial=True).score == 0.5
    assert fn_calling.verify_fn_calling(f + g + g, problem).score == 0.0


@pytest.mark.parametrize("family", ["leg_counting", "knights_knaves", "spiral_matrix"])
def test_logic_agrees_with_the_scorers_of_the_package(family: str) -> None:
    import reasoning_gym

    problems = logic.load_problems(["test"], families=[family], num_test=5)
    data = reasoning_gym.create_dataset(family, seed=problems[0]["seed"], size=5)
    for problem, entry in zip(problems, data, strict=True):
        assert problem["question"] == entry["question"]
        for answer in (entry["answer"], "nonsense", "0"):
            expected = data.score_answer(answer, entry)
            assert logic.verify_logic(f"<answer>{answer}</answer>", problem).score == pytest.approx(expected)


def test_logic_names_near_families() -> None:
    with pytest.raises(DomainError, match="leg_counting"):
        logic.load_problems(["train"], families=["leg_count"])
    with pytest.raises(DomainError, match="nonsense"):
        logic.load_problems(["train"], families={"leg_counting": {"nonsense": 1}}, num_train=1)


@pytest.mark.parametrize(
    ("family", "answer", "harmless"),
    [
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "[__import__('os')]", False),
        ("countdown", "(3 + 4) * 5", True),
        ("countdown", "().__class__", False),
        ("simple_integration", "x**2*sin(x) + C", True),
        ("simple_integration", "exit()", False),
        ("simple_integration", "x.evalf(10)", False),
        ("knights_knaves", "Ada's a knight", True),
    ],
)
def test_scorers_that_evaluate_see_no_code(family: str, answer: str, harmless: bool) -> None:
    assert is_harmless(family, answer) is harmless


def test_math_without_its_package_says_what_to_install_or_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(DomainError, match=r"pipelinerl\[math\].*--config-name guessing"):
        math.load_problems(["train"])
