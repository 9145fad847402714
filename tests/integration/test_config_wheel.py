"""The wheel carries the configuration files, and an installed package works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def said(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_works_from_any_folder(tmp_path: Path) -> None:
    # Without isolation: the build backend is the installed one, so no network is needed.
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    said(build, tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*") if path.is_file()}
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipelinerl/analysis/view/page").iterdir()}
    assert {f"pipelinerl/{name}" for name in shipped} | page <= names

    # Its own environment, which sees the other packages of this one.
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment)
    site = Path(
        said([str(environment / "bin/python"), "-c", "import site; print(site.getsitepackages()[0])"], tmp_path).strip()
    )
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python")]
    said([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], tmp_path)

    program = str(environment / "bin/pipelinerl")
    assert said([program, "--help"], elsewhere).startswith("usage: pipelinerl COMMAND")
    shown = yaml.safe_load(said([program, "launch", "--config-name", "quickstart", "--cfg", "job"], elsewhere))
    assert (shown["attempts"], shown["model_path"]) == (8, "results/tiny-model")
    code = "import pipelinerl; from pipelinerl.config.load import conf_dir; print(pipelinerl.__file__, conf_dir())"
    module, folder = said([str(environment / "bin/python"), "-c", code], elsewhere).split()
    assert Path(module).is_relative_to(site) and Path(folder) == site / "pipelinerl/conf"
    assert list(elsewhere.iterdir()) == []
