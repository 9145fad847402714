"""Calls a task's own `validate`. Called by the check of a task, and by `multi` for its parts. Waits for the grader.

A grader that looks at the configuration in a rollout (an address of a server, say) has to see the same one here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def gold_score(validate: Callable[..., float | None], problem: dict[str, Any], config: Any) -> float | None:
    """Return the score of the problem's gold answer; None: it has none.

    Args:
        validate: `validate(problem)`, or `validate(problem, config)`; the second parameter goes by its name.
        problem: as the loader gave it.
        config: of the run, as `generate_rollout` gets it.
    """
    if "config" in inspect.signature(validate).parameters:
        return validate(problem, config=config)
    return validate(problem)
