"""Checks a run's user code before anything is started: dotted paths, signatures, data sets.

Called by the launcher in a child process, through `pipelinerl.entrypoints.check_domain`. Waits for the user's loader.
"""

from __future__ import annotations

from pipelinerl.config import RunConfig
from pipelinerl.domains.datasets import load_problem_sets
from pipelinerl.domains.registry import load_rollout_function


def check_domain(config: RunConfig) -> str:
    """Return one line about the problems that were found.

    Raises:
        DomainError: something cannot be used; the message says what to do.
    """
    load_rollout_function(config)
    problems = load_problem_sets(config)
    return f"{len(problems.train)} training problems, {len(problems.test)} test problems"
