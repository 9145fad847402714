"""Logic and puzzles: every task family of the package reasoning-gym, by name, graded by its own scorers."""

from pipelinerl.domains.lazy import lazy_names
from pipelinerl.domains.logic.problems import gold_answer, load_problems

__all__ = ["generate_logic_rollout", "gold_answer", "load_problems", "validate", "verify_logic"]
__getattr__ = lazy_names(
    __name__, {"generate_logic_rollout": "rollout", "verify_logic": "verify", "validate": "verify"}
)
