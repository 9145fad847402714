"""Renews the tables of docs/metrics.md and docs/configuration.md: `python scripts/document.py`.

A metric is explained where it is recorded: a comment that begins with `#: `, at the end of the line that holds the name
or on lines of its own right above it. `f"actor/{dataset}/reward"` is shown as `actor/<dataset>/reward`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config import key_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
#: First part of a name: which table it belongs to.
KINDS = ("actor", "evaluation", "finetune", "preprocessor", "rl", "weight_update")
NAME = re.compile(rf"(?!evaluation/[^/]*$)({'|'.join(KINDS)})(/[a-z0-9_<>]+)+")


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names of metrics in a module, with their lines."""
    nodes = list(ast.walk(tree))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(map(_shown, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        if NAME.fullmatch(text):
            yield text, node.lineno


def _shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else part
    word = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else "value"
    return f"<{word}>"


def comments(source: str) -> dict[int, str]:
    """Line -> the `#: ` comment that explains it."""
    lines = source.splitlines()
    found: dict[int, str] = {}
    above: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string.startswith("#: "):
            row, text = token.start[0], token.string[3:].strip()
            if lines[row - 1].lstrip().startswith("#"):
                above.append(text)
                if row < len(lines) and not lines[row].lstrip().startswith("#: "):
                    found[row + 1] = " ".join(above)
                    above = []
            else:
                found[row] = text
    return found


def collect(package: Path) -> tuple[dict[str, str], list[str]]:
    """Meanings by name, and what is wrong: names without a meaning, names with two."""
    meanings: dict[str, str] = {}
    places: dict[str, str] = {}
    wrong: list[str] = []
    for file in sorted(package.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        explained = comments(source)
        for name, line in names(ast.parse(source)):
            places.setdefault(name, f"{file.relative_to(package.parent)}:{line}")
            meaning = explained.get(line)
            if meaning is not None and meanings.setdefault(name, meaning) != meaning:
                wrong.append(f"{name}: {places[name]} and {file.name}:{line} explain it differently")
    wrong += [f"{name}: no `#: ` comment explains it ({places[name]})" for name in sorted(set(places) - set(meanings))]
    return meanings, wrong


def renew(text: str, meanings: dict[str, str]) -> str:
    """The page with new tables between its marks `<!-- KIND: begin -->` and `<!-- KIND: end -->`."""
    for kind in KINDS:
        rows = [f"| `{name}` | {meanings[name]} |" for name in sorted(meanings) if name.startswith(f"{kind}/")]
        table = "\n".join(["| name | meaning |", "|---|---|", *rows])
        begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{PAGE} lacks {begin} or {end}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def main() -> int:
    meanings, wrong = collect(ROOT / "pipelinerl")
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8"), meanings), encoding="utf-8")
    CONFIGURATION.write_text(key_table.renew(CONFIGURATION.read_text(encoding="utf-8")), encoding="utf-8")
    print("\n".join(wrong or ["docs/metrics.md and docs/configuration.md are up to date"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
