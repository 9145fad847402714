"""Every command in README.md and docs/ is valid: launches compose, other commands take their arguments."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from fakes.decoder_shape import decoder_shape
from fakes.model_folder import save_adapter_folder

from pipelinerl.__main__ import main
from pipelinerl.config.compose import compose
from pipelinerl.config.former_keys import synonym_of
from pipelinerl.domains import math
from pipelinerl.inference.main import main as serve
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText
from pipelinerl.world import Cluster, ClusterNode, build_world_map

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(export |source |bash |(\S*/)?python|(\S*/)?pip |pipelinerl |sbatch |\w+=\S+ python)")


def _lines() -> list[tuple[str, str]]:
    """Page and line of every command: all lines of blocks marked as bash, the commands among those of unmarked ones."""
    found = []
    for page in PAGES:
        for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() if kind == "bash" else not kind and COMMAND.match(line):
                    found.append((page.name, line))
    return found


def _inline() -> list[Any]:
    """Page and words of the commands within sentences, without those that stand for others."""
    found = []
    for page in PAGES:
        for line in re.findall(r"`(python -m pipelinerl [a-z-]+ [^`]*)`", page.read_text(encoding="utf-8")):
            found.append((page.name, re.sub(r"\[(.*?)( \.\.\.)?\]", r"\1", line)))
    # Importing `replay` takes longer than all the others.
    return [pytest.param(*each, marks=[pytest.mark.slow] * (" replay " in each[1])) for each in sorted(set(found))]


class Accepted(Exception):
    """The parser of a command took its words, all but `left`."""

    def __init__(self, left: list[str]) -> None:
        self.left = left


def _left(command: Callable[[list[str]], Any], words: list[str]) -> list[str]:
    """What the parser of `command` does not know; the command itself does not run."""
    known = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, words: list[str], space: Any = None) -> None:
        raise Accepted(known(parser, words, space)[1])

    names = ("parse_args", "parse_known_args")
    with patch.multiple(argparse.ArgumentParser, **dict.fromkeys(names, parse)), pytest.raises(Accepted) as accepted:
        command(words)
    return accepted.value.left


def _compose(page: str, words: list[str]) -> None:
    """Compose a launch, with the page's own configuration and an agent function; placeholders stay unread."""
    if {"NAME", "DIR", "--help"} & {*words, *(word.partition("=")[2] for word in words)}:
        return
    Path("agent_func.py").write_text("async def step(state, action, label, **kwargs): ...\n")
    save_adapter_folder(Path(RECIPE_ADAPTER))
    if "--config-dir" in words:
        folder, name = (words[words.index(flag) + 1] for flag in ("--config-dir", "--config-name"))
        (path,) = (path for path in PAGES if path.name == page)
        Path(folder).mkdir()
        for own in (block for kind, block in BLOCK.findall(path.read_text(encoding="utf-8")) if "_self_" in block):
            (Path(folder) / f"{name}.yaml").write_text(own)
    words = [word for word in words if word not in ("...", "--cfg")]
    words = words if any(word.startswith("output_dir=") for word in words) else [*words, "output_dir=run"]
    composed = compose(words, may_be_several=True)
    assert composed.config is not None or composed.members


def _check(page: str, words: list[str]) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    match words:
        case ["python", "-m", "pipelinerl.launch", *rest]:
            _compose(page, rest)
        case ["python", "-m", "pipelinerl.inference.main", *rest]:
            assert _left(serve, rest) == []
        case ["python", "-m", "pipelinerl", *rest] | ["pipelinerl", *rest]:
            _check_own(page, rest)
        case ["sbatch", *rest]:
            place = rest.index("scripts/slurm.sbatch")
            assert all(word.startswith("-") for word in rest[:place])
            _compose(page, rest[place + 1 :])
        case _ if words and all("=" in word for word in words):
            _compose(page, words)
        case _:
            _check_other(words)


def _check_own(page: str, words: list[str]) -> None:
    match words:
        case ["launch", *rest]:
            _compose(page, rest)
        case ["check-domain", *rest]:
            _compose(page, rest if rest[0].startswith("-") or rest == ["NAME"] else ["--config-name", *rest])
        case ["plan", *_]:
            _compose(page, _left(main, words))
        case _:
            assert _left(main, words) == []


def _check_other(words: list[str]) -> None:
    match words:
        case [] | ["export", *_] | ["source", ".venv/bin/activate"] | ["python3.11", "-m", "venv", ".venv"]:
            pass
        case ["bash", script, *_]:
            assert (ROOT / script).is_file()
        case ["pip" | ".venv/bin/pip", "install" | "uninstall", *rest]:
            for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
                assert set(extras.split(",")) <= set(EXTRAS)
        case ["python", "-c", code]:
            ast.parse(code)
        case ["python", script, *rest]:
            source = (ROOT / script).read_text(encoding="utf-8")
            assert all(f'"{word}"' in source for word in rest if word.startswith("--"))
        case _:
            raise AssertionError(f"not a known command: {words}")


@pytest.mark.parametrize(("page", "line"), [*_lines(), *_inline()])
def test_the_command_is_valid(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in line.split(" && "):
        words = shlex.split(command, comments=True)
        _check(page, words[: words.index(">")] if ">" in words else words)


@pytest.mark.parametrize("name", ["rayjob", "skypilot"])
def test_a_file_for_a_cluster_starts_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its form, as far as it can be seen without the program that reads it."""
    monkeypatch.chdir(tmp_path)
    task = yaml.safe_load((ROOT / "deploy" / f"{name}.yaml").read_text(encoding="utf-8"))
    if name == "rayjob":
        assert (task["apiVersion"], task["kind"]) == ("ray.io/v1", "RayJob")
        cluster = task["spec"]["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for pod in (group["template"]["spec"] for group in groups):
            mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
            (environ,) = (container["env"] for container in pod["containers"])
            assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in environ
            assert mounts == {volume["name"] for volume in pod["volumes"]} and cluster["authOptions"]["mode"] == "token"
        line = task["spec"]["entrypoint"]
    else:
        assert task["num_nodes"] > 1 and task["secrets"] == {"RAY_AUTH_TOKEN": None}
        line = next(each for each in task["run"].splitlines() if "pipelinerl.launch" in each)
    words = shlex.split(line)
    _compose("nodes.md", words[words.index("pipelinerl.launch") + 1 :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_and_configurations_are_well_formed(page: Path) -> None:
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        assert kind in ("", "bash", "python", "yaml")
        if kind == "python":
            ast.parse(block)
        elif kind == "yaml":
            assert yaml.safe_load(block)


RECIPES = {
    words[-1].partition("/")[2]: words[3:]
    for words in (shlex.split(line) for page, line in _lines() if page == "recipes.md")
    if "--config-dir" not in words and "-c" not in words
}
#: Of another run.
RECIPE_ADAPTER = "results/lora/finetune/current/adapter"
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
def test_a_recipe_takes_the_cards_that_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_adapter_folder(Path(RECIPE_ADAPTER))
    composed = compose(RECIPES[name])
    assert composed.config is not None and composed.notes == []
    servers, ranks = SPLITS.get(name, SPLITS["eight" if "gsm8k" not in RECIPES[name] else "one"])
    num_gpus = 1 + max(int(gpu) for gpu in (*servers[-1], *ranks))
    cluster = Cluster((ClusterNode("h", tuple(map(str, range(num_gpus))), 64, gpu_bytes=141 * 10**9),))
    # What shares a GPU with the trainer has to be known.
    small = decoder_shape(494_032_768, 24, 2, 64, 32768) if num_gpus <= 2 else None
    world = build_world_map(composed.config, cluster, model=small)
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
