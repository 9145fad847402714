"""The user's code is imported in a process of its own before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError, UserError
from pipelinerl.run.preflight import Start, check_domain
from pipelinerl.world import Cluster


def check(folder: Path, body: str, **environ: str) -> list[str]:
    (folder / "checked_task.py").write_text(
        f"import os, sys\ndef load_problems(names):\n    {body}\n"
        "async def generate_rollout(cfg, llm, problem, session): ...\n"
    )
    run = RunConfig(
        output_dir="x",
        dataset_loader="checked_task.load_problems",
        train_dataset_names=["a"],
        actor={"rollout_policy": "checked_task.generate_rollout"},  # type: ignore[arg-type]
    )
    return check_domain(Start(run, Cluster(1, 0, "h", None, ("h",), (), 1), {**os.environ, **environ}, [folder]))


def test_the_problems_are_counted(tmp_path: Path) -> None:
    body = "print('1 training problems, no'); return [{'dataset': 'a', 'n': n} for n in range(3)]"
    (line,) = check(tmp_path, body)
    assert line.startswith("3 ") and " 0 test" in line


@pytest.mark.parametrize("line", ["os._exit(0)", "sys.exit(0)"])
def test_a_check_that_the_users_code_ends_is_no_success(tmp_path: Path, line: str) -> None:
    with pytest.raises(DomainError, match=r"sys\.exit\(\)"):
        check(tmp_path, line)


def test_o5_the_users_code_does_not_see_the_secret_of_the_launchers(tmp_path: Path) -> None:
    body = "raise ValueError(f\"seen: {os.environ.get('PIPELINERL_NODE_SECRET')}\")"
    with pytest.raises(UserError, match="seen: None"):
        check(tmp_path, body, PIPELINERL_NODE_SECRET="0123456789abcdef")
