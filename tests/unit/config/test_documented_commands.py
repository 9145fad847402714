"""Every launch command in README.md and docs/ is a valid configuration."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LAUNCH = re.compile(r"python -m pipelinerl(?:\.launch| launch) (.*)")


def _commands() -> list[tuple[str, list[str]]]:
    """Page and arguments of each command, without those of tasks that a page defines and of placeholders."""
    found = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            for match in LAUNCH.finditer(line.partition("`")[0]):
                words = [word for word in shlex.split(match[1], comments=True) if word not in ("...", "--cfg")]
                values = {word.partition("=")[2] for word in words}
                if not {"NAME", "DIR", "--config-dir", "--help"} & {*words, *values}:
                    found.append((page.name, words))
    return found


@pytest.mark.parametrize(("page", "words"), _commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_command_composes(page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent_func.py").write_text("async def step(state, action, label, **kwargs): ...\n")
    words = words if any(word.startswith("output_dir=") for word in words) else [*words, "output_dir=run"]
    assert compose(words).config is not None
