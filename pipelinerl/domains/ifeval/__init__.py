"""Instruction following: a small task with constraints that a program can check."""

from pipelinerl.domains.ifeval.problems import gold_answer, load_problems
from pipelinerl.domains.ifeval.verify import validate, verify_ifeval
from pipelinerl.domains.lazy import lazy_names

__all__ = ["generate_ifeval_rollout", "gold_answer", "load_problems", "validate", "verify_ifeval"]
__getattr__ = lazy_names(__name__, {"generate_ifeval_rollout": "rollout"})
