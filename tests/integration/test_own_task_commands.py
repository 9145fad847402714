"""The commands for a task of one's own in README.md and docs/domains.md work as they are written, without a GPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [("README.md", "sums", "my_task"), ("docs/domains.md", "my_sums", "sums")]
COMMAND = re.compile(r"^(?:\.venv/bin/)?python (-m pipelinerl.*)$", re.MULTILINE)


def own_task(document: str, module: str, folder: Path) -> list[list[str]]:
    """Write the two files of the document's first example; returns the arguments of the commands that follow it."""
    text = (ROOT / document).read_text(encoding="utf-8")
    source, settings = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    assert source is not None and settings is not None
    folder.mkdir()
    (folder / f"{module}.py").write_text(source.group(1))
    (folder / "sums.yaml").write_text(settings.group(1))
    shell = re.search(r"```(?:bash)?\n([^`]*python -m pipelinerl.*?)```", text[settings.end() :], re.DOTALL)
    assert shell is not None
    return [shlex.split(line) for line in COMMAND.findall(shell.group(1).replace("\\\n", " "))]


def run(arguments: list[str], cwd: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.parametrize(
    ("document", "module", "folder"), [DOCUMENTS[0], pytest.param(*DOCUMENTS[1], marks=pytest.mark.slow)]
)
def test_the_example_is_checked_and_planned(document: str, module: str, folder: str, tmp_path: Path) -> None:
    check, _, launch = own_task(document, module, tmp_path / folder)
    checked = run(check, tmp_path, 300)
    assert checked.returncode == 0, checked.stderr
    assert "1 sample(s)" in checked.stdout
    planned = run([*launch, "dry_run=true"], tmp_path, 300)
    assert planned.returncode == 0, planned.stderr
    assert "device cpu" in planned.stdout and "max_lag 64" in planned.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("document", "module", "folder"), DOCUMENTS)
def test_the_commands_run_as_they_are_written(document: str, module: str, folder: str, tmp_path: Path) -> None:
    check, make_model, launch = own_task(document, module, tmp_path / folder)
    for arguments in (check, [*make_model, "--no-warmup"], launch):
        done = run(arguments, tmp_path, 600)
        assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "results" / "sums" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)
