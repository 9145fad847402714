"""Reach a target from given numbers with + - * /: procedural, with many right answers."""

from pipelinerl.domains.countdown.problems import gold_answer, load_problems
from pipelinerl.domains.countdown.verify import validate, verify_countdown
from pipelinerl.domains.lazy import lazy_names

__all__ = ["generate_countdown_rollout", "gold_answer", "load_problems", "validate", "verify_countdown"]
__getattr__ = lazy_names(__name__, {"generate_countdown_rollout": "rollout"})
