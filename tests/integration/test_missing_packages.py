"""Outside the project's environment a command says so, in one line."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipelinerl import __main__, dependencies

ROOT = Path(__file__).parents[2]
MODULES = {
    "hydra-core": "hydra",
    "pyyaml": "yaml",
    "nvidia-ml-py": "pynvml",
    "inotify-simple": "inotify_simple",
    "prometheus-client": "prometheus_client",
}


@pytest.mark.parametrize("module", ["pipelinerl", "pipelinerl.launch", "pipelinerl.analysis.check_domain"])
def test_a_python_without_the_packages(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", module, "status", "results/x"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: the Python environment \S+ lacks msgspec, .*source \.venv/bin/activate", line)


def test_an_old_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dependencies.sys, "version_info", (3, 9, 2, "final", 0))
    with pytest.raises(SystemExit) as ended:
        dependencies.require_core()
    assert ended.value.code == 2
    assert "this is Python 3.9.2, expected 3.11 or newer" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "code"), [("torch", 2), ("a_module_of_the_user", None)])
def test_a_package_that_one_command_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str, code: int | None
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.nn")

    monkeypatch.setattr(__main__, "import_module", fail)
    if code is None:
        with pytest.raises(ModuleNotFoundError):
            __main__.main(["tiny-model"])
        return
    assert __main__.main(["tiny-model"]) == code
    assert f"lacks {missing}. Use the project's environment" in capsys.readouterr().err


def test_the_names_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9-]", entry)[0] for entry in project["dependencies"]]
    assert sorted(MODULES.get(name, name) for name in names) == sorted(dependencies.DEPENDENCIES)
    assert project["requires-python"] == f">={'.'.join(map(str, dependencies.MINIMUM))}"


def test_pages_with_commands_name_the_environment() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if page.name == "changelog.md" or not re.search(r"python (-m pipelinerl|scripts/)", text):
            continue
        assert "source .venv/bin/activate" in text, page
        assert ".venv/bin/python -m pipelinerl" not in text, page
