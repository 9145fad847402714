"""The site of docs/ (mkdocs.yml): its navigation has every page, links and anchors resolve, and it builds strictly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.config.keys import is_known, known_keys
from pipelinerl.tracking.health import RULES

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def _pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in _pages_of(part)]


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings that are the same on a repository host and in the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        on_host = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        in_site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        if on_host == in_site:
            found.add(on_host)
    return found


def test_the_navigation_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(_pages_of(nav)) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_resolve_on_a_repository_host_and_in_the_site(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert page.parent != DOCS or target.parent == DOCS, f"{link} leaves the site"
        assert not anchor or anchor in _anchors(target), link


def test_troubleshooting_quotes_what_the_code_prints_and_names_every_finding_and_only_known_keys() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "pipelinerl").rglob("*.py"))
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)  # messages of several lines
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = re.findall(r"^\| (.*?) \|.*\|.*\|$", page, re.MULTILINE)
    quotes = [quote for symptom in symptoms for quote in re.findall(r"`([^`]*)`", symptom)]
    parts = [part.strip() for quote in quotes for part in re.split(r"\.\.\.|: got|=\w+", quote)]
    assert len(parts) > 40
    assert [part for part in parts if part not in source and part != "KEY"] == []
    findings = {rule.__name__ for rule in RULES} | {"groups_equal", "starved_trainer", "idle_servers"}
    assert [name for name in sorted(findings) if f"`{name}`" not in page] == []
    sections = {key.name.partition(".")[0] for key in known_keys() if "." in key.name}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)", page)
    assert [name for name in named if not is_known(name)] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="needs pip install -e '.[docs]'")
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    assert not re.search(r"^(WARNING|ERROR)", built.stderr, re.MULTILINE)
    for page in PAGES:
        place = tmp_path if page.stem == "index" else tmp_path / page.stem
        html = (place / "index.html").read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]*\bsrc=.?(?:https?:)?//", html)
        assert not re.search(r"<link[^>]*\brel=.?(?:stylesheet|preconnect)[^>]*\bhref=.?(?:https?:)?//", html)
        # A table that Markdown of the site reads as text shows its rule.
        assert "|---" not in html, page.name
