"""Function calling: choose the function and its arguments; calls are written as text and read without ever raising."""

from pipelinerl.domains.fn_calling.problems import gold_answer, load_problems
from pipelinerl.domains.fn_calling.verify import validate, verify_fn_calling
from pipelinerl.domains.lazy import lazy_names

__all__ = ["generate_fn_calling_rollout", "gold_answer", "load_problems", "validate", "verify_fn_calling"]
__getattr__ = lazy_names(__name__, {"generate_fn_calling_rollout": "rollout"})
