"""Public data sets load from their real shapes, a user's map leads to other fields, and sources give the same rows."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from fakes.data_set_rows import FN_CALLING, IFEVAL, MATH

from pipelinerl.domains import fn_calling, ifeval, math
from pipelinerl.domains.data_sets import data_set, preview, read_rows
from pipelinerl.domains.shapes import KNOWN
from pipelinerl.errors import DomainError

ROWS = [{"q": f"{n} + 1?", "meta": {"final": n + 1, "source": "ab"[n % 2]}, "level": n} for n in range(6)]
FIELDS = {"task": "q", "answer": "meta.final"}


def served(monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> list[Any]:
    """Let the hub have these rows; return what it is asked for."""
    asked: list[Any] = []

    def load_dataset(path: str, name: str | None = None, **words: Any) -> Any:
        asked.append((path, name, words))
        return [dict(zip("01", row, strict=True)) if isinstance(row, list) else row for row in rows]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def file_of(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", MATH)
def test_math_data_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, (first, last) = MATH[name]
    served(monkeypatch, rows)
    problems = math.load_problems([name])
    assert [(each["task"], each["answer"]) for each in (problems[0], problems[-1])] == [first, last]
    assert len(problems) == 2 and len({each["id"] for each in problems}) == 2
    assert {each["dataset"] for each in problems} == {name}
    for problem in problems:
        assert math.validate(problem) == 1.0
        assert math.verify_math("\\boxed{-1001}", problem).score == 0.0


def test_levels_become_difficulties(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("math_train", [0.5, 0.0]), ("math_500", [0.5, 1.0])):
        served(monkeypatch, MATH[name][0])
        assert [each["difficulty"] for each in math.load_problems([name])] == expected


@pytest.mark.parametrize("name", FN_CALLING)
def test_fn_calling_data_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, wrong = FN_CALLING[name]
    served(monkeypatch, rows)
    problems = fn_calling.load_problems([name])
    assert len(problems) == len(rows)
    for problem, answer in zip(problems, wrong, strict=True):
        assert fn_calling.validate(problem) == 1.0
        assert fn_calling.verify_fn_calling(answer, problem).score == 0.0
        for tool in problem["tools"]:
            parameters = tool["function"]["parameters"]
            assert tool["type"] == "function" and parameters["type"] == "object"
            kinds = {each["type"] for each in parameters["properties"].values()}
            assert kinds <= {"string", "integer", "number", "object"}


def test_calls_with_several_right_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """BFCL: texts regardless of case and signs, a 4 is a 4.0, and "" says that an argument may be missing."""
    served(monkeypatch, FN_CALLING["bfcl/rows:test"][0])
    simple, parallel = fn_calling.load_problems(["bfcl/rows:test"])

    def score(problem: Any, *arguments: Any) -> float:
        calls = [json.dumps({"name": "ferry.book", "arguments": each}) for each in arguments]
        return fn_calling.verify_fn_calling("".join(f"<tool_call>{each}</tool_call>" for each in calls), problem).score

    assert score(simple, {"route": "a to b"}) == score(simple, {"route": "A-B", "length": 4}) == 1.0
    assert score(simple, {"length": 4}) == score(simple, {"route": "A-B", "cabin": 1}) == score(simple, {}) == 0.0
    inside = {"route": "A-B", "extras": {"type": "any"}}
    assert score(parallel, {"route": "B-A"}, inside) == 1.0
    assert score(parallel, {"route": "B-A"}, {"route": "A-B", "extras": {"type": "outside"}}) == 0.0
    assert score(parallel, inside, inside) == 0.0


def test_answers_in_another_file_are_joined_by_id(tmp_path: Path) -> None:
    rows = FN_CALLING["bfcl/rows:test"][0]
    questions = [{key: value for key, value in row.items() if key != "ground_truth"} for row in rows]
    answers = [{"id": row["id"], "ground_truth": row["ground_truth"]} for row in reversed(rows)]
    given = {"path": file_of(tmp_path, questions, "q.json"), "answers": file_of(tmp_path, answers, "a.json")}
    assert [fn_calling.validate(each) for each in fn_calling.load_problems([given])] == [1.0, 1.0]


@pytest.mark.parametrize("name", IFEVAL)
def test_ifeval_data_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, answers = IFEVAL[name]
    served(monkeypatch, rows)
    problems = ifeval.load_problems([name])
    for problem, (right, wrong) in zip(problems, answers, strict=True):
        assert ifeval.validate(problem) is None and ifeval.question(problem) == problem["prompt"]
        assert ifeval.validate({**problem, "response": right}) == 1.0
        assert ifeval.validate({**problem, "response": wrong}) == 0.0


def test_instructions_that_cannot_be_checked_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (row,) = IFEVAL["google_ifeval"][0]
    unknown, lacking = {**row, "instruction_id_list": ["count:vowels"]}, {**row, "kwargs": [{}, {"num_words": 3}]}
    served(monkeypatch, [unknown, row, lacking])
    (problem,) = ifeval.load_problems(["google_ifeval"])
    assert problem["id"] == "google_ifeval-1" and "count:vowels" in caplog.text and "relation" in caplog.text
    served(monkeypatch, [unknown])
    with pytest.raises(DomainError, match="count:vowels"):
        ifeval.load_problems(["google_ifeval"])


def test_files_of_lists_are_rows(tmp_path: Path) -> None:
    """Open-Reasoner-Zero's own files: one JSON list, whose rows are lists of turns."""
    rows = MATH["open_reasoner_zero_57k"][0]
    (tmp_path / "orz.json").write_text(json.dumps(rows, indent=1))
    problems = math.load_problems([str(tmp_path / "orz.json")])
    assert problems == math.load_problems([file_of(tmp_path, rows, "orz.jsonl")])
    assert [each["answer"] for each in problems] == ["21", "\\sqrt{3}"]


@pytest.mark.parametrize("domain", KNOWN)
def test_known_names_are_data_sets(domain: str) -> None:
    for name in KNOWN[domain]:
        found = data_set(name, domain, KNOWN[domain])
        assert found.name == name and found.path


def test_the_page_names_known_data_sets() -> None:
    text = (Path(__file__).parents[3] / "docs/domains.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    named = {row[0].strip("| `"): re.findall(r"`(\w+)`", row[2]) for row in rows if len(row) == 3 and "_" in row[2]}
    for domain in KNOWN:
        assert named[domain] and set(named[domain]) <= set(KNOWN[domain])


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("gsm8k_test", ("openai/gsm8k", "main", {"split": "test", "revision": None})),
        ("a/b", ("a/b", None, {"split": "train", "revision": None})),
        ("a/b@v2:s:test[:2]", ("a/b", "s", {"split": "test[:2]", "revision": "v2"})),
        ({"path": "a/b", "subset": "s", "revision": "v"}, ("a/b", "s", {"split": "train", "revision": "v"})),
        ({"name": "gsm8k_test", "split": "train"}, ("openai/gsm8k", "main", {"split": "train", "revision": None})),
        ("https://x.org/y.json", ("json", None, {"data_files": "https://x.org/y.json", "split": "train"})),
    ],
)
def test_what_the_hub_is_asked_for(given: Any, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = served(monkeypatch, MATH["gsm8k_train"][0])
    assert len(math.load_problems([given])) == 2 and found == [asked]


def test_sources_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.flatten().rename_columns({"meta.final": "final", "meta.source": "source"}).to_csv(tmp_path / "flat.csv")
    names = ["saved", "splits:test", "rows.parquet"]
    expected = list(read_rows(data_set(file_of(tmp_path, ROWS), "x"), "x"))
    assert expected == ROWS
    for name in names:
        assert list(read_rows(data_set(f"{tmp_path}/{name}", "x"), "x")) == ROWS, name
    (problem, *_) = math.load_problems([{"path": f"{tmp_path}/flat.csv", "fields": {"task": "q", "answer": "final"}}])
    assert problem == {"id": "flat-0", "dataset": "flat", "task": "0 + 1?", "answer": "1"}
    for name in ("absent.parquet", "absent.csv", "absent/", "splits"):
        with pytest.raises(DomainError, match=r"absent|splits"):
            math.load_problems([f"{tmp_path}/{name}"])


def test_a_map_leads_to_fields_of_other_names(tmp_path: Path) -> None:
    file = file_of(tmp_path, ROWS)
    problems = math.load_problems([file], fields=FIELDS, limit=2)
    assert [(each["task"], each["answer"]) for each in problems] == [("0 + 1?", "1"), ("1 + 1?", "2")]
    own = {"path": file, "name": "mine", "fields": {**FIELDS, "task": "meta.source"}, "limit": 1}
    (problem,) = math.load_problems([own], fields=FIELDS)
    assert (problem["task"], problem["id"], problem["dataset"]) == ("a", "mine-0", "mine")


def test_the_map_of_a_user_wins_over_the_rows_own_columns(tmp_path: Path) -> None:
    """`answer` and `problem` are there, too, and would make other shapes fit."""
    row = {"task": "no", "problem": "no", "answer": "7", "q": "6*7?", "why": "So \\boxed{42}", "hard": 0.5}
    (problem,) = math.load_problems(
        [file_of(tmp_path, [row])], fields={"task": "q", "solution": "why", "difficulty": "hard"}
    )
    assert (problem["task"], problem["answer"], problem["difficulty"]) == ("6*7?", "42", 0.5)
    (problem,) = math.load_problems([file_of(tmp_path, [{"problem": "6*7?", "why": 42}])], fields={"answer": "why"})
    assert (problem["task"], problem["answer"]) == ("6*7?", "42")
    with pytest.raises(DomainError, match="why"):
        math.load_problems([file_of(tmp_path, [{"q": "6*7?", "answer": "7"}])], fields={"task": "q", "solution": "why"})


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def test_dialogues_whose_answer_belongs_to_a_later_question_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = [turn("user", "1+1?"), turn("assistant", "2")], [turn("user", "1+2?"), turn("assistant", "3")]
    rows = [{"id": 1, "messages": one}, {"id": 2, "messages": one + two}]
    assert [each["id"] for each in math.load_problems([file_of(tmp_path, rows)])] == ["rows-1"]
    assert "1 with several turns of the user" in caplog.text
    with pytest.raises(DomainError, match="several"):
        math.load_problems([file_of(tmp_path, [{"prompt": one + two[:1], "answer": "3"}])])
    called, tools = [turn("user", "call f"), turn("assistant", "", **CALL), *one], [{"name": "f", "parameters": {}}]
    rows = [{"id": 1, "messages": called, "tools": tools}, {"id": 2, "messages": one + called, "tools": tools}]
    (problem,) = fn_calling.load_problems([file_of(tmp_path, rows)])
    assert (problem["id"], problem["task"]) == ("rows-1", "call f")


@pytest.mark.parametrize("tools", [[{"function": "f"}], ["f"], [{"parameters": {}}], [{"function": {"name": 1}}]])
def test_tools_that_are_none_are_left_out(tools: list[Any], tmp_path: Path) -> None:
    row = {"task": "call f", "tools": [{"name": "f"}], "expected": [{"name": "f", "arguments": {}}]}
    (problem,) = fn_calling.load_problems([file_of(tmp_path, [row | {"tools": tools}, row])])
    assert problem["id"] == "rows-1"


def test_a_data_set_that_contributes_nothing_is_refused(tmp_path: Path) -> None:
    full, file = file_of(tmp_path, ROWS), file_of(tmp_path, [], "empty.jsonl")
    for given, words in (({"path": full, "name": "x", "filter": {"level": 9}}, "'x'.*filter"), (file, "'empty'")):
        with pytest.raises(DomainError, match=words):
            math.load_problems([full, given], fields=FIELDS)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"level": 3}, [3]),
        ({"level": [1, 4]}, [1, 4]),
        ({"level": {"min": 2, "max": 4}}, [2, 3, 4]),
        ({"meta.source": "b", "level": {"not": 3}}, [1, 5]),
        ({"q": {"contains": "5 +"}}, [5]),
        ({"level": {"not": [0, 1, 2]}}, [3, 4, 5]),
    ],
)
def test_filters(rules: dict[str, Any], left: list[int], tmp_path: Path) -> None:
    given = {"path": file_of(tmp_path, ROWS), "filter": rules, "limit": 3}
    assert [row["level"] for row in read_rows(data_set(given, "x"), "x")] == left


def test_shares_say_how_often_a_data_set_is_drawn(tmp_path: Path) -> None:
    small = {"path": file_of(tmp_path, ROWS[:2], "small.jsonl"), "share": 3}
    problems = math.load_problems([small, file_of(tmp_path, ROWS, "large.jsonl")], fields=FIELDS)
    assert [(each["domain"], each["share"]) for each in (problems[0], problems[-1])] == [
        ("small", 0.75),
        ("large", 0.25),
    ]


def test_data_sets_of_one_name(tmp_path: Path) -> None:
    """Rows have ids of their own; shares need names of their own."""
    twice = [{"path": file_of(tmp_path, ROWS), "limit": 2}, {"path": file_of(tmp_path, ROWS), "filter": {"level": 5}}]
    problems = math.load_problems(twice, fields=FIELDS)
    assert [each["id"] for each in problems] == ["rows-0", "rows-1", "rows-0.2"]
    with pytest.raises(DomainError, match="rows"):
        math.load_problems([{**each, "share": 1} for each in twice], fields=FIELDS)


def test_what_a_dry_run_says_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = served(monkeypatch, [])
    hub, row, *_ = preview("math", ["train", "gsm8k_train", file_of(tmp_path, ROWS)], FIELDS)
    assert "openai/gsm8k" in hub and "task: '0 + 1?'" in row and "answer: '1'" in row and asked == []
    assert len(preview("math", [file_of(tmp_path, ROWS)], FIELDS)) == 3
    for names, words in (
        (["gsm8k_tran"], "gsm8k_train"),
        ([file_of(tmp_path, ROWS)], r"q, meta\.final"),
        (["no.csv"], "no.csv"),
    ):
        with pytest.raises(DomainError, match=words):
            preview("math", names)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else object())
    with pytest.raises(DomainError, match=r"pipelinerl\[data\]"):
        preview("coding", ["mbpp"])


def test_a_wrong_shape_is_answered_with_its_fields_and_the_map(tmp_path: Path) -> None:
    file = file_of(tmp_path, [{"my_query": "1+1?", "meta": {"gold_answer": "2", "n": 1}}])
    with pytest.raises(DomainError) as caught:
        math.load_problems([file])
    said = str(caught.value)
    assert "my_query, meta.gold_answer, meta.n" in said and "{task: FIELD, answer: FIELD}" in said
    (problem,) = math.load_problems([file], fields={"task": "my_query", "answer": "meta.gold_answer"})
    assert problem["answer"] == "2"
    with pytest.raises(DomainError, match=r"meta\.gold .*my_query"):
        math.load_problems([file], fields={"task": "my_query", "answer": "meta.gold"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gsm8k_tain", "gsm8k_train"),
        ({"nam": "gsm8k_train"}, "nam"),
        ({"name": "gsm8k_train", "share": 0}, "share"),
        ({"name": "gsm8k_train", "limit": 0}, "limit"),
        ({}, "unknown"),
        ({"name": "train", "split": "x"}, "split"),
        ({"path": "rows.jsonl", "revision": "v1"}, "revision"),
        ({"path": "rows.jsonl", "fields": {"tsak": "q"}}, "tsak"),
    ],
)
def test_unknown_names_and_keys(given: Any, words: str) -> None:
    with pytest.raises(DomainError, match=words):
        math.load_problems([given])


@pytest.mark.parametrize(("rules", "words"), [({"nope": 1}, "meta.final"), ({"level": {"over": 1}}, "over")])
def test_unknown_filters(rules: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=words):
        math.load_problems([{"path": file_of(tmp_path, ROWS), "filter": rules}], fields=FIELDS)
