"""Mathematics with a final answer: GSM8K, MATH, AIME and the like, JSONL files of your own, and small sums offline."""

from pipelinerl.domains.lazy import lazy_names
from pipelinerl.domains.math.problems import gold_answer, load_problems

__all__ = ["generate_math_rollout", "gold_answer", "load_problems", "validate", "verify_math"]
__getattr__ = lazy_names(__name__, {"generate_math_rollout": "rollout", "verify_math": "verify", "validate": "verify"})
