"""Checks a run's user code before anything is started: dotted paths, signatures, data sets, gold answers.

The module of `dataset_loader` may define three more functions: `check_config(config)`, which refuses what cannot work
here; `gold_answer(problem) -> str | None`, a right output; `validate(problem) -> float | None` or
`validate(problem, config)`, the score of the gold answer, which has to be 1 (None: this problem has none).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.domains.problem_sets import Problem, ProblemSets, load_problem_sets
from pipelinerl.domains.registry import describe_error, gold_score, load_dataset_loader, load_rollout_function
from pipelinerl.errors import DomainError, UserError
from pipelinerl.rl.user_function import check_user_functions
from pipelinerl.sandbox.main import check_environment

MAX_VALIDATED = 200
_NEARLY = 1 - 1e-6


def check_domain(config: RunConfig) -> str:
    """Return one line about the problems that were found.

    Raises:
        DomainError: something cannot be used; the message says what to do.
        ConfigError: a loss or an advantage estimator of the user cannot be imported.
    """
    return count_line(checked_problems(config))


def count_line(problems: ProblemSets) -> str:
    """One line about the problems that were found."""
    return f"{len(problems.train)} training problems, {len(problems.test)} test problems"


def checked_problems(config: RunConfig) -> ProblemSets:
    """Return the problems after checking all that the run needs of the domain."""
    load_rollout_function(config)
    # Names what is wrong with the path; the module is imported below without such care.
    load_dataset_loader(config)
    check_config = domain_function(config, "check_config")
    if check_config is not None:
        try:
            check_config(config)
        except UserError:
            raise
        except Exception as error:
            raise DomainError(f"check_config refuses the configuration: {describe_error(error)}") from error
    check_environment(config)
    check_user_functions(config.finetune.rl)
    return load_problem_sets(config)


def domain_function(config: RunConfig, name: str) -> Callable[..., Any] | None:
    """Return the optional function `name` of the module that holds the dataset loader."""
    module = importlib.import_module(str(config.dataset_loader).rpartition(".")[0])
    function: Callable[..., Any] | None = getattr(module, name, None)
    return function if callable(function) else None


def check_answers(config: RunConfig, problems: ProblemSets) -> str:
    """Let the domain grade its own gold answers and return one line about it.

    Raises:
        DomainError: a gold answer does not score 1.
    """
    validate = domain_function(config, "validate")
    if validate is None:
        return f"{config.dataset_loader}: its module has no validate(problem), so gold answers are not checked"
    chosen = [*_spread(problems.train), *_spread(problems.test)]
    num_checked = 0
    for problem in chosen:
        try:
            score = gold_score(validate, problem.data, config)
        except Exception as error:
            raise DomainError(f"validate of problem {problem.id!r} raised {describe_error(error)}") from error
        if score is None:
            continue
        num_checked += 1
        if not score >= _NEARLY:
            raise DomainError(
                f"validate: the gold answer of problem {problem.id!r} scores {score}, expected 1. Correct the problem "
                f"or the grader. Problem: {str(problem.data)[:400]}"
            )
    return f"the gold answers of {num_checked} of {len(chosen)} problems were graded, and each scores 1"


def _spread(problems: list[Problem]) -> list[Problem]:
    """Return at most `MAX_VALIDATED` problems, evenly spread."""
    step = -(-len(problems) // MAX_VALIDATED)
    return problems[:: max(step, 1)]
