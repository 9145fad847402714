"""What every process starts with, and the exit codes of a role."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.role import RoleContext, load_context, quick_imports, run_role
from pipelinerl.rundir.heartbeat import read_heartbeat
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.world import Job, WorldMap


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    files = RunDir(tmp_path / "run")
    write_identity(files.identity_file, RunIdentity(run_id="run-1", incarnation=2))
    save_config(RunConfig(output_dir=str(files.root), attempts=5), files.config_file)
    job = Job("actor", "actor_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    files.world_file.write_text(WorldMap([job], "cpu", 1, "127.0.0.1", 29500).to_json())
    return files


def role(run_dir: RunDir, main: Callable[[RoleContext], None], job: str = "actor_0") -> int:
    return run_role(main, ["--run-dir", str(run_dir.root), "--job", job])


def test_a_role_gets_its_view_of_the_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SERVER_TOKEN", "t")
    context = load_context(run_dir.root, "actor_0")
    context.heartbeat.stop()
    assert (context.run_id, context.incarnation, context.token) == ("run-1", 2, "t")
    assert context.config.attempts == 5
    assert context.job.name == "actor_0"
    assert read_heartbeat(run_dir.heartbeat_file("actor_0")) is not None


def test_an_unknown_job_or_folder_is_named(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor_9.*actor_0"):
        load_context(run_dir.root, "actor_9")
    with pytest.raises(ConfigError, match=r"run\.json is missing"):
        load_context(tmp_path / "nothing", "actor_0")


def test_exit_codes(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    assert role(run_dir, lambda context: seen.append(context.job.name)) == 0
    assert seen == ["actor_0"]
    assert role(run_dir, lambda context: None, job="actor_9") == 2
    assert "Traceback" not in capsys.readouterr().err

    def refuse(context: RoleContext) -> None:
        raise DomainError("the data set is empty")

    assert role(run_dir, refuse) == 2
    assert capsys.readouterr().err.endswith("error: the data set is empty\n")

    def fail(context: RoleContext) -> None:
        raise ValueError("bad row 7")

    assert role(run_dir, fail) == 1
    assert "Traceback" in (err := capsys.readouterr().err) and "ValueError: bad row 7" in err


@pytest.mark.parametrize("was_on", [True, False])
def test_what_imports_leave_is_never_searched_for_garbage(monkeypatch: pytest.MonkeyPatch, was_on: bool) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "isenabled", lambda: was_on)
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    with contextlib.suppress(ImportError), quick_imports():
        calls.append("import")
        raise ImportError("no torch")
    assert calls == ["disable", "import", "freeze", *["enable"] * was_on]
