"""The files around the package say what holds: versions, interpreters, and places that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pipelinerl import __version__

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == __version__ == citation["version"]
    assert PROJECT["license"] == citation["license"]


def test_public_ci_runs_every_supported_python_by_the_suite_s_own_script() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    wanted = [entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", entry)]
    assert wanted == ["3.11", "3.12", "3.13"]
    assert all(jobs[name]["strategy"]["matrix"]["python"] == wanted for name in ("test", "wheel"))
    assert {"run": "bash scripts/test.sh"} in jobs["test"]["steps"]


@pytest.mark.parametrize("place", re.findall(r"`([\w.]+/[\w./]*)`", (ROOT / "CONTRIBUTING.md").read_text()))
def test_the_map_for_contributors_names_what_exists(place: str) -> None:
    assert (ROOT / place).exists()


def test_the_image_is_made_of_what_the_package_needs() -> None:
    """The build context leaves out everything else: what is copied has to be let in."""
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(name for words in copied for name in words.split()) == sorted(let_in)
    assert all((ROOT / name).exists() for name in let_in)
