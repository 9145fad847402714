"""The constraints: for each kind its words in the prompt and its check. Pure; linear in the text.

Called by the problem maker (words) and the grader (checks).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

Arguments = Mapping[str, Any]
_BULLET = re.compile(r"^[ \t]*[-*] \S", re.MULTILINE)


@dataclass(frozen=True)
class Constraint:
    """`words` is a template for the arguments; `check(text, arguments)` says whether `text` follows."""

    words: str
    check: Callable[[str, Arguments], bool]


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text; letters, digits and apostrophes make a word."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


def _is_json(text: str, arguments: Arguments) -> bool:
    body = text.strip()
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    try:
        value = msgspec.json.decode(body.encode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(value, dict) and all(key in value for key in arguments["keys"])


def _paragraphs(text: str) -> int:
    return len([part for part in text.strip().split("\n\n") if part.strip()])


CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        "min_words": Constraint("Use at least {count} words.", lambda text, a: len(words_of(text)) >= a["count"]),
        "max_words": Constraint("Use at most {count} words.", lambda text, a: len(words_of(text)) <= a["count"]),
        "keyword": Constraint('Include the word "{word}".', lambda text, a: a["word"] in words_of(text)),
        "forbidden": Constraint('Do not use the word "{word}".', lambda text, a: a["word"] not in words_of(text)),
        "lowercase": Constraint("Use lower-case letters only.", lambda text, a: text == text.lower()),
        "uppercase": Constraint("Use CAPITAL letters only.", lambda text, a: text == text.upper()),
        "no_commas": Constraint("Do not use commas.", lambda text, a: "," not in text),
        "bullets": Constraint(
            "Write exactly {count} bullet points, each on a line that starts with '- '.",
            lambda text, a: len(_BULLET.findall(text)) == a["count"],
        ),
        "paragraphs": Constraint(
            "Write exactly {count} paragraphs with an empty line between them.",
            lambda text, a: _paragraphs(text) == a["count"],
        ),
        "starts_with": Constraint(
            'Begin with exactly "{phrase}".', lambda text, a: text.lstrip().startswith(a["phrase"])
        ),
        "ends_with": Constraint('End with exactly "{phrase}".', lambda text, a: text.rstrip().endswith(a["phrase"])),
        "json": Constraint("Answer with one JSON object that has the keys {keys}.", _is_json),
    }
)


def describe(kind: str, arguments: Arguments) -> str:
    """Return the constraint in words."""
    shown = {key: ", ".join(value) if isinstance(value, list) else value for key, value in arguments.items()}
    return CONSTRAINTS[kind].words.format(**shown)


def follows(text: str, kind: str, arguments: Arguments) -> bool:
    """Whether `text` follows; an empty text follows nothing."""
    return bool(text.strip()) and CONSTRAINTS[kind].check(text, arguments)
