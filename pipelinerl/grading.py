"""Public names for graders: mark a function with `@grader`, then `await verify(function, text, problem)` in a rollout.

`verify` waits for a free grader process, then for the grade until its deadline.
"""

from __future__ import annotations

from typing import Any

from pipelinerl.config.task import VerifierConfig
from pipelinerl.sandbox.protocol import (
    Failed,
    Grade,
    GradeRequest,
    GraderFunction,
    GradeStatus,
    error_of,
    grader,
    grader_path,
)
from pipelinerl.sandbox.services import current_verifier, open_verifier

__all__ = ["Grade", "GradeStatus", "VerifierConfig", "grader", "open_verifier", "verify"]


async def verify(
    function: GraderFunction | str,
    text: str,
    problem: dict[str, Any],
    *,
    timeout_s: float | None = None,
    **params: Any,
) -> Grade:
    """Run `function(text, problem, **params)` in a grader process and return its grade.

    Args:
        function: marked with `@grader`, at the top of a module, or its dotted path. It returns a `Grade` or a number,
            of which 1 is right. An answer that takes all of its processor time or memory scores 0.
        timeout_s: processor time for this one grading (None: `verifier.timeout_s`); it may take four times as long.

    Raises:
        RolloutError: the function raised, returned no number, or waited until its deadline. Let it pass: the rollout
            has failed and is counted by its reason; it never counts as 0. If the function raised
            `RetryableRolloutError`, that is what is raised here, and the rollout is tried again.
    """
    request = GradeRequest(grader_path(function), text, problem, params, timeout_s)
    answer = await current_verifier().grade(request)
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer
