"""The instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911), by their ids: whether a text follows them.

The prompts of that data set say in words what is asked for. Sentences are counted by their punctuation, where the
benchmark's own program uses a trained tokenizer; `change_case` looks at the case and not at the language.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pipelinerl.domains.data import optional

Arguments = Mapping[str, Any]
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_STAR_BULLET = re.compile(r"^\s*\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^\s*-.*$", re.MULTILINE)
_HIGHLIGHTS = (re.compile(r"\*\*([^\n*]+)\*\*"), re.compile(r"(?<!\*)\*([^\n*]+)\*(?!\*)"))
_TITLE = re.compile(r"<<([^\n]+)>>")
_FENCE = re.compile(r"\A```(?:json|JSON|Json)?|```\Z")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _compares(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation {relation!r}")
    return count >= bound if relation == "at least" else count < bound


def _sentences(text: str) -> int:
    parts = _SENTENCE_END.split(text.strip())
    return sum(bool(_WORD.search(part)) for part in parts)


def _parts(text: str, mark: str) -> list[str] | None:
    """Return the parts between marks; None: one between two marks is empty. Empty ends do not count."""
    parts = [part.strip() for part in text.split(mark)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1] and len(parts) > 1)]
    return parts if all(parts) else None


def _is_repeated(text: str, a: Arguments) -> bool:
    return text.strip().lower().startswith(str(a["prompt_to_repeat"]).strip().lower())


def _has_postscript(text: str, a: Arguments) -> bool:
    letters = re.findall(r"\w", str(a["postscript_marker"]).lower())
    return re.search(r"\b" + r"\.\s?".join(letters) + r"\b", text.lower()) is not None


def _first_word(text: str, a: Arguments) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text.strip())]
    # All at once: what is missing is found before there is a text to grade.
    count, place, first_word = int(a["num_paragraphs"]), int(a["nth_paragraph"]) - 1, str(a["first_word"]).lower()
    if len(paragraphs) != count or not 0 <= place < len(paragraphs):
        return False
    word = _WORD.search(paragraphs[place].lower())
    return word is not None and word[0] == first_word


def _is_json(text: str, a: Arguments) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, a: Arguments) -> bool:
    parts = _parts(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _paragraphs(text: str, a: Arguments) -> bool:
    parts = _parts(text, "***")
    return parts is not None and len(parts) == a["num_paragraphs"]


def _is_in_language(text: str, a: Arguments) -> bool:
    language = a["language"]
    try:
        detector = _detectors().create()
        detector.append(text)
        return bool(detector.detect() == language)
    except Exception:  # noqa: BLE001 - a text without letters has no language
        return False


@functools.cache
def _detectors() -> Any:
    langdetect = optional("langdetect", "ifeval", "ifeval")
    factory = langdetect.DetectorFactory()
    factory.load_profile(langdetect.PROFILES_DIRECTORY)
    factory.seed = 0  # of this object: the same text is always in the same language
    return factory


def _count(text: str, word: str) -> int:
    return text.lower().count(str(word).lower())


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(str(word))}\b", text, re.IGNORECASE) is not None


INSTRUCTIONS: Mapping[str, Callable[[str, Arguments], bool]] = MappingProxyType(
    {
        "keywords:existence": lambda text, a: all(_count(text, word) for word in a["keywords"]),
        "keywords:frequency": lambda text, a: _compares(_count(text, a["keyword"]), a["relation"], a["frequency"]),
        "keywords:forbidden_words": lambda text, a: not any(_has_word(text, word) for word in a["forbidden_words"]),
        "keywords:letter_frequency": lambda text, a: _compares(
            _count(text, a["letter"]), a["let_relation"], a["let_frequency"]
        ),
        "language:response_language": _is_in_language,
        "length_constraints:number_sentences": lambda text, a: _compares(
            _sentences(text), a["relation"], a["num_sentences"]
        ),
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:number_words": lambda text, a: _compares(
            len(_WORD.findall(text)), a["relation"], a["num_words"]
        ),
        "length_constraints:nth_paragraph_first_word": _first_word,
        "detectable_content:number_placeholders": lambda text, a: (
            len(re.findall(r"\[.*?\]", text)) >= a["num_placeholders"]
        ),
        "detectable_content:postscript": _has_postscript,
        "detectable_format:number_bullet_lists": lambda text, a: (
            len(_STAR_BULLET.findall(text)) + len(_DASH_BULLET.findall(text)) == a["num_bullets"]
        ),
        "detectable_format:constrained_response": lambda text, a: any(each in text for each in _ANSWERS),
        "detectable_format:number_highlighted_sections": lambda text, a: (
            sum(bool(found.strip()) for each in _HIGHLIGHTS for found in each.findall(text)) >= a["num_highlights"]
        ),
        "detectable_format:multiple_sections": lambda text, a: (
            len(re.findall(rf"{re.escape(str(a['section_spliter']))}\s?\d+", text)) >= a["num_sections"]
        ),
        "detectable_format:json_format": _is_json,
        "detectable_format:title": lambda text, a: any(each.strip("<> ") for each in _TITLE.findall(text)),
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _is_repeated,
        "startend:end_checker": lambda text, a: (
            text.strip().strip('"').lower().endswith(str(a["end_phrase"]).strip().lower())
        ),
        "startend:quotation": lambda text, a: (
            len(text.strip()) > 1 and text.strip().startswith('"') and text.strip().endswith('"')
        ),
        "change_case:capital_word_frequency": lambda text, a: _compares(
            sum(word.isupper() for word in re.findall(r"[\w'-]+", text)), a["capital_relation"], a["capital_frequency"]
        ),
        "change_case:english_capital": lambda text, a: text.isupper(),
        "change_case:english_lowercase": lambda text, a: text.islower(),
        "punctuation:no_comma": lambda text, a: "," not in text,
    }
)


def read_instructions(ids: Any, arguments: Any) -> list[dict[str, Any]] | str:
    """Return constraints `{"kind": id, its arguments}`, or why these cannot be checked.

    Args:
        ids: list of ids.
        arguments: list of mappings, one for each id; those that are None are left out.
    """
    if not isinstance(ids, list) or not ids:
        return "without an instruction"
    arguments = arguments if isinstance(arguments, list) else []
    constraints = []
    for place, kind in enumerate(ids):
        own = arguments[place] if place < len(arguments) and isinstance(arguments[place], Mapping) else {}
        constraint = {key: value for key, value in own.items() if value is not None}
        if kind not in INSTRUCTIONS:
            return f"with the unknown instruction {kind!s}"
        if kind == "language:response_language":
            _detectors()
        try:
            INSTRUCTIONS[kind]("a", constraint)
        except (KeyError, TypeError, ValueError) as error:
            return f"with {kind} that lacks an argument: {error}"
        constraints.append({"kind": kind, **constraint})
    return constraints
