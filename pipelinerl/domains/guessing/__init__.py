"""Guess a number from "higher" and "lower": the smallest multi-turn task, used by the quickstart.

The configuration names ``load_problems`` and ``generate_guessing_rollout``. The second is imported on first use, so
that the problems and the words of the game can be read without loading the client of the servers.
"""

from typing import Any

from pipelinerl.domains.guessing.gold import gold_answer, validate
from pipelinerl.domains.guessing.problems import load_problems

__all__ = ["generate_guessing_rollout", "gold_answer", "load_problems", "validate"]


def __getattr__(name: str) -> Any:
    if name == "generate_guessing_rollout":
        from pipelinerl.domains.guessing.rollout import generate_guessing_rollout

        return generate_guessing_rollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
