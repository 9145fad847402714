"""Each instruction of IFEval with a text that follows it and one that does not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipelinerl.domains import ifeval_instructions
from pipelinerl.domains.ifeval import follows
from pipelinerl.domains.ifeval_instructions import INSTRUCTIONS, read_instructions
from pipelinerl.errors import DomainError

AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sea", "salt"]}, "Salt of the SEA", "the sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, **AT_LEAST}, "Sea and sea", "one sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, **LESS}, "one sea", "Sea and sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "seaside", "the Sea"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, "A banana", "an"),
    ("language:response_language", {"language": "de"}, "Das Salz ist weiß und fein.", "The salt is white and fine."),
    ("length_constraints:number_sentences", {"num_sentences": 3, **AT_LEAST}, 'One. "Two!" 3.5 is three', "One. 3.5"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb ***\nc"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "*** a *** b ***", "a *** *** b"),
    ("length_constraints:number_words", {"num_words": 3, **LESS}, "two words", "now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "salt"},
        'sea\n\n"Salt" is',
        "salt\n\nsea",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "tops a"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "a\nP.P.S b", "a\nP.S. b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "So: My answer is maybe.", "maybe"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a\nSECTION 2 b",
        "SECTION 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<salt>> is", "<< >> is"),
    ("combination:two_responses", {}, "a ****** b", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why salt?"}, "why salt? Because", "Because"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'so. "the end."', "The end. No"),
    ("startend:quotation", {}, ' "a" ', '"a'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "SALT and SEA",
        "Salt and SEA",
    ),
    ("change_case:english_capital", {}, "SALT 1!", "Salt"),
    ("change_case:english_lowercase", {}, "salt 1!", "Salt"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("kind", "arguments", "good", "bad"), CASES)
def test_instructions(kind: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(good, kind, arguments) and not follows(bad, kind, arguments) and not follows(" ", kind, arguments)


@pytest.mark.parametrize(("kind", "arguments"), [case[:2] for case in CASES])
def test_every_argument_is_needed(kind: str, arguments: dict[str, Any]) -> None:
    assert read_instructions([kind], [arguments]) == [{"kind": kind, **arguments}]
    for name in arguments:
        lacking = {key: value for key, value in arguments.items() if key != name}
        assert name in read_instructions([kind], [lacking])


def test_every_instruction_is_tested() -> None:
    assert {case[0] for case in CASES} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25


def test_the_package_for_languages_is_named_where_a_row_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ifeval_instructions._detectors.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(DomainError, match=r"pipelinerl\[ifeval\]"):
        read_instructions(["language:response_language"], [{"language": "de"}])
    assert read_instructions(["punctuation:no_comma"], [None]) == [{"kind": "punctuation:no_comma"}]
