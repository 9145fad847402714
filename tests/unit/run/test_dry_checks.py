"""What a dry run says about a start: faults of output_dir, model and task, without running anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.model_folder import save_model_folder

from pipelinerl.config import RunConfig
from pipelinerl.run.dry_checks import function_fault, look_around

TASK = """
import sys
from os import *
sys.exit("the file was run")
"""
MODULE = """
import json, os.path
try:
    from fast import load_quickly
except ImportError:
    def load_quickly(names): ...
if True:
    CONSTANT = 5
else:
    pass
def load_problems(names): ...
async def generate_rollout(cfg, llm, problem, session): ...
@json.dumps
def wrapped(cfg): ...
raise RuntimeError("the file was run")
"""


def config(folder: Path, **changes: Any) -> RunConfig:
    values = {
        "output_dir": str(folder / "out"),
        "model_path": str(folder / "model"),
        "dataset_loader": "dry_task.load_problems",
        "actor": {"rollout_policy": "dry_task.generate_rollout"},
    }
    return RunConfig.model_validate({**values, **changes})


def test_a_start_that_nothing_speaks_against(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model")
    (tmp_path / "dry_task.py").write_text(MODULE)
    found = look_around(config(tmp_path), [tmp_path])
    assert found.faults == [] and found.notes == []
    assert "nothing was found against a start" in found.text() and "check-domain" in found.text()
    assert not (tmp_path / "out").exists() and "dry_task" not in sys.modules


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    save_model_folder(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    (tmp_path / "dry_task.py").write_text(MODULE.replace("async ", ""))
    found = look_around(config(tmp_path, dataset_loader=None), [tmp_path])
    keys = ["output_dir", "model_path", "dataset_loader is not set", "actor.rollout_policy"]
    assert [fault.startswith(key) for fault, key in zip(found.faults, keys, strict=True)] == [True] * 4
    assert "a start here would be refused:\n- output_dir" in found.text()


def test_a_model_on_the_hub_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "dry_task.py").write_text(MODULE)
    found = look_around(config(tmp_path, model_path="nobody/nothing"), [tmp_path])
    assert found.faults == [] and "whether the hub has nobody/nothing" in found.text()
    assert look_around(config(tmp_path, model_path="./nothing"), [tmp_path]).faults != []


@pytest.mark.parametrize(
    ("path", "is_async", "words"),
    [
        ("static_names.load_problems", False, None),
        ("static_names.generate_rollout", True, None),
        ("static_names.load_quickly", False, None),
        ("static_names.CONSTANT", False, None),  # a start tells that it is no function
        ("static_names.wrapped", True, None),
        ("static_names.load_problem", False, "Did you mean static_names.load_problems?"),
        ("static_names.generate_rollot", True, "Did you mean static_names.generate_rollout?"),
        ("static_names.zzz", True, "has no 'zzz'. Define it there."),
        ("static_names.load_problems", True, "expected `async def`"),
        ("static_names.generate_rollout", False, "with `async def`, expected `def`"),
        ("static_names.inner.load", False, "no module 'static_names.inner'"),
        ("no_such_module_here.load", False, "no module 'no_such_module_here'"),
        ("load", False, "with a dot between them"),
        ("starred.anything", False, None),
        ("broken.load", False, "is no Python"),
        ("folder.inside.load", False, None),
        ("folder.other.load", False, "no module 'folder.other'"),
        ("pipelinerl.domains.guessing.load_problems", False, None),
        ("pipelinerl.domains.no_such.load_problems", False, "no module 'pipelinerl.domains.no_such'"),
        ("time.sleep", False, None),
    ],
)
def test_names_are_found_in_the_text_of_their_file(
    tmp_path: Path, path: str, is_async: bool, words: str | None
) -> None:
    (tmp_path / "static_names.py").write_text(MODULE)
    (tmp_path / "starred.py").write_text(TASK)
    (tmp_path / "broken.py").write_text("def load(:\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside.py").write_text("def load(names): ...\n")
    fault = function_fault(path, is_async, [tmp_path])
    assert fault is None if words is None else words in str(fault)
