"""The wheel carries the configuration files, and an installed package composes from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_installed_wheel_composes_from_any_folder(tmp_path: Path) -> None:
    # Without isolation: the build backend is the installed one, so no network is needed.
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*") if path.is_file()}
    assert {f"pipelinerl/{name}" for name in shipped} <= names
    code = (
        "import pipelinerl; from pipelinerl.config.compose import compose;"
        "from pipelinerl.config.load import conf_dir;"
        "print(pipelinerl.__file__); print(conf_dir());"
        "print(compose(['--config-name', 'guessing', 'output_dir=x']).config.attempts)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    module, folder, attempts = done.stdout.splitlines()
    assert Path(module).is_relative_to(site) and Path(folder) == site / "pipelinerl" / "conf"
    assert attempts == "8"
