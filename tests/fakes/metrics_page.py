"""Names of metrics in docs/metrics.md, and which recorded names it does not explain. Used by the tests of the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$")
NOT_METRICS = {"time", "step", "source"}


def explained_names() -> list[str]:
    """Names of the page in order, with placeholders like `<reason>`."""
    rows = (ROW.match(line) for line in PAGE.read_text(encoding="utf-8").splitlines())
    return [row[1] for row in rows if row]


def pattern_of(name: str) -> re.Pattern[str]:
    """Matches what `name` stands for; a placeholder is one or more characters other than a slash."""
    return re.compile(re.sub(r"<[a-z]+>", "[^/]+", name))


def unexplained(recorded: Iterable[str]) -> list[str]:
    """Those of `recorded` that no line of the page matches."""
    patterns = [pattern_of(name) for name in explained_names()]
    return sorted(
        name for name in set(recorded) - NOT_METRICS if not any(pattern.fullmatch(name) for pattern in patterns)
    )
