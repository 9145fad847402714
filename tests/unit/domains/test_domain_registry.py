"""User code is found and checked with one clear message each; problems are loaded and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.analysis.check_domain import checked_problems
from pipelinerl.config.run import RunConfig
from pipelinerl.domains.user_task import load_dataset_loader, load_problem_sets, load_rollout_function
from pipelinerl.errors import DomainError

GOOD = """
def load_problems(dataset_names, size=2):
    return [{"question": i, "dataset": name} for name in dataset_names for i in range(size)]

async def generate_rollout(cfg, llm, problem, session):
    return None
"""


@pytest.fixture
def write_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module `task_<n>` that can be imported; return its name."""
    monkeypatch.syspath_prepend(tmp_path)
    count = 0

    def write(source: str) -> str:
        nonlocal count
        count += 1
        name = f"{tmp_path.name.replace('-', '_')}_task_{count}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    return write


def config(module: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "output_dir": "unused",
        "dataset_loader": f"{module}.load_problems",
        "train_dataset_names": ["train"],
        "test_dataset_names": ["test"],
        "actor": {"rollout_policy": f"{module}.generate_rollout"},
    }
    return RunConfig.model_validate(values | changes)


def test_a_good_task(write_task: Any) -> None:
    run = config(write_task(GOOD), dataset_loader_params={"size": 3})
    problems = checked_problems(run)
    assert (len(problems.train), len(problems.test)) == (3, 3)
    problems = load_problem_sets(run)
    again = load_problem_sets(run)
    ids = [problem.id for problem in problems.train]
    assert ids == [problem.id for problem in again.train] and len(set(ids)) == 3
    assert problems.test[0].dataset_name == "test"


def test_sets_of_evaluations_are_loaded_by_themselves(write_task: Any) -> None:
    source = "def load_problems(names):\n    return [{'names': list(names), 'q': i} for i in range(len(names))]\n"
    sets = [{"name": "aime", "k": 4}, {"name": {"file": "x"}}]
    run = config(write_task(source), test_dataset_names=["test", "aime", "other"], eval=sets)
    found = [(problem.evaluation_set, problem.data["names"]) for problem in load_problem_sets(run).test]
    assert found == [(0, ["test", "other"])] * 2 + [(1, ["aime"]), (2, [{"file": "x"}])]
    source = "def load_problems(names):\n    return [{'a': 1}] if 'train' in names else []\n"
    with pytest.raises(DomainError, match=r"no problem for eval.1.name=\['b'\]"):
        load_problem_sets(config(write_task(source), test_dataset_names=[], eval=[{"name": "train"}, {"name": "b"}]))


def test_problems_of_held_out_sets_are_told_apart(write_task: Any) -> None:
    """Ids that are there twice in a data set are two problems; results are grouped by data set."""
    source = (
        "def load_problems(names):\n    return [{'id': 'p', 'q': i, 'dataset': n[-1]} for n in names for i in (1, 2)]\n"
    )
    run = config(write_task(source), test_dataset_names=["a", "b"], eval=[{"name": "c", "k": 4}])
    found = [(problem.dataset_name, problem.id) for problem in load_problem_sets(run).test]
    assert found == [(name, number) for name in "abc" for number in ("p", "p.2")]
    for plain, own in ((["a", "b"], ["xb"]), ([], ["xc", "yc"])):
        with pytest.raises(DomainError, match=f"'{own[-1][-1]}'"):
            sets = [{"name": name} for name in own]
            load_problem_sets(config(write_task(source), test_dataset_names=plain, eval=sets))


def test_own_ids_are_kept_and_subsets_are_cut(write_task: Any) -> None:
    source = "def load_problems(names):\n    return [{'id': i} for i in range(10)]\n"
    problems = load_problem_sets(config(write_task(source), train_subset={"begin": 2, "end": 4}, test_dataset_names=[]))
    assert [problem.id for problem in problems.train] == ["2", "3"]
    assert [problem.dataset_name for problem in problems.train] == ["train", "train"]
    assert problems.test == []


ROLLOUT = "async def generate_rollout(cfg, llm, problem, session): ...\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "import no_such_package_anywhere\n" + GOOD,
            r"importing .*py:1\).*needs the module 'no_such_package_anywhere'",
        ),
        ("x = 1 / 0\n" + GOOD, r"importing .*py:1\).*ZeroDivisionError"),
        ("def broken(:\n", r"importing .*py:1\).*SyntaxError"),
        ("def load_problem(names): ...\n", r"has no 'load_problems'.*Did you mean .*\.load_problem\?"),
        ("async def load_problem(names): ...\n", r"has no 'load_problems'.*Define load_problems there"),
        ("import sys\nsys.exit(0)\n" + GOOD, r"importing .*py:2\): the file calls sys\.exit\(\)"),
        ("load_problems = 5\n", "is a int, expected a function"),
        ("def load_problems(): ...\n", r"py:1\) has the signature \(\).*expected def load_problems"),
        ("async def load_problems(names): ...\n", "is async, expected a plain function"),
        ("def load_problems(names):\n    raise KeyError('q')\n", "raised KeyError: 'q'"),
        ("def load_problems(names):\n    return 5\n", "returned a int, expected a list of dicts"),
        ("def load_problems(names):\n    return ['a']\n", "problem 0 is a str, expected a dict"),
        ("def load_problems(names):\n    return [{'a': object()}]\n", "problem 0 cannot be sent to a rollout worker"),
        ("def load_problems(names):\n    return []\n", r"no training problem for train_dataset_names=\['train'\]"),
        (
            "def load_problems(n):\n    return [{'a': 1}] if n == ['train'] else []\n",
            r"no problem for test_dataset_names",
        ),
    ],
)
def test_faults_of_the_loader(write_task: Any, source: str, words: str) -> None:
    with pytest.raises(DomainError, match=f"dataset_loader.*{words}"):
        load_problem_sets(config(write_task(source)))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def generate_rollout(cfg, llm, problem, session): ...\n", r"py:1\) is not async.*Write `async def`"),
        ("async def generate_rollout(cfg, llm): ...\n", r"signature \(cfg, llm\), expected async def"),
        ("async def rollout(cfg, llm, problem, session): ...\n", "has no 'generate_rollout'"),
    ],
)
def test_faults_of_the_rollout_function(write_task: Any, source: str, words: str) -> None:
    with pytest.raises(DomainError, match=rf"actor\.rollout_policy.*{words}"):
        load_rollout_function(config(write_task(source)))


def test_functions_with_bound_arguments_and_callable_objects(write_task: Any) -> None:
    source = """
import functools
async def general(cfg, llm, problem, session, style): ...
generate_rollout = functools.partial(general, style="short")
class Rollout:
    async def __call__(self, cfg, llm, problem, session): ...
other = Rollout()
"""
    name = write_task(source)
    assert load_rollout_function(config(name))
    assert load_rollout_function(config(name, actor={"rollout_policy": f"{name}.other"}))


def test_paths_that_lead_nowhere() -> None:
    with pytest.raises(DomainError, match=r"no module 'no_such_task'.*next to your configuration"):
        load_dataset_loader(config("no_such_task"))
    with pytest.raises(DomainError, match=r"got 'load_problems', expected module and function with a dot"):
        load_dataset_loader(config("x", dataset_loader="load_problems"))
    with pytest.raises(DomainError, match="dataset_loader is not set"):
        load_dataset_loader(config("x", dataset_loader=None))


def test_unknown_loader_parameters(write_task: Any) -> None:
    with pytest.raises(DomainError, match=r"dataset_loader_params \['colour'\].*unexpected keyword argument 'colour'"):
        load_dataset_loader(config(write_task(GOOD), dataset_loader_params={"colour": 1}))
