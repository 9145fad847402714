"""Every launch command in README.md and docs/ is a valid configuration."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.former_keys import synonym_of
from pipelinerl.domains import math
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText
from pipelinerl.world import Cluster, FreePorts, build_world_map

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


RECIPES = {words[-1].partition("/")[2]: words for page, words in _commands() if page == "recipes.md"}
#: GPUs of the servers of a recipe, one list for each, and of its trainer ranks; the others take turns or share one.
SPLITS = {
    "one": ([["0"], ["0"]], ["0"]),
    "two": ([["0"], ["0"]], ["1"]),
    "three": ([["0"], ["1"], ["2"]], ["3"]),
    "eight": ([["0"], ["1"], ["2"], ["3"]], ["4", "5", "6", "7"]),
    "two-each": ([["0", "1"], ["2", "3"]], ["4", "5", "6", "7"]),
    "turns": ([["0"]], ["0"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_the_cards_that_it_says(name: str) -> None:
    composed = compose(RECIPES[name])
    assert composed.config is not None and composed.notes == []
    servers, ranks = SPLITS.get(name, SPLITS["eight" if "gsm8k" not in RECIPES[name] else "one"])
    num_gpus = 1 + max(int(gpu) for gpu in (*servers[-1], *ranks))
    cluster = Cluster.from_env({}, lambda: [str(gpu) for gpu in range(num_gpus)], 64)
    world = build_world_map(composed.config, cluster, FreePorts(composed.config, reserve=False))
    assert [job.gpus for job in world.jobs_of("actor_llm")] == servers
    assert [gpu for job in world.jobs_of("finetune") for gpu in job.gpus] == ranks


async def test_the_metric_of_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rollout(*args: object) -> RolloutResult:
        text = TrainingText(text="?1\n2", n_predicted=3)
        return RolloutResult([text], BaseMetrics(reward=1.0, success=True))

    monkeypatch.setattr(math, "generate_math_rollout", rollout)
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)
    task: dict[str, Any] = {}
    exec(source, task)
    result = await task["generate_rollout"](None, None, {}, None)
    assert result.metrics.model_extra == {"lines": 2}


def test_the_table_of_other_names_says_what_the_messages_say() -> None:
    _, _, table = (ROOT / "docs" / "recipes.md").read_text().partition("| TRL ")
    _, *rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|(.*)\|$", table, re.MULTILINE)
    assert len(rows) > 10
    for *others, here in rows:
        for cell in others:
            names = re.findall(r"`-{0,2}([\w.]+)", cell)
            keys = [(synonym_of(name) or name).rpartition(".")[2] for name in names]
            assert not names or any(key in here for key in keys), (cell, here)
