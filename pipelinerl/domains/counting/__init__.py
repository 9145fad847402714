"""Count how often a letter occurs in a word: procedural, short answers, for small models and first tries."""

from pipelinerl.domains.counting.problems import gold_answer, load_problems
from pipelinerl.domains.counting.verify import validate, verify_counting
from pipelinerl.domains.lazy import lazy_names

__all__ = ["generate_counting_rollout", "gold_answer", "load_problems", "validate", "verify_counting"]
__getattr__ = lazy_names(__name__, {"generate_counting_rollout": "rollout"})
