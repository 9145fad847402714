"""Programming: the model writes a Python program, which a sandbox runs on tests."""

from pipelinerl.domains.coding.check import check_config
from pipelinerl.domains.coding.problems import gold_answer, load_problems
from pipelinerl.domains.coding.verify import validate, verify_coding
from pipelinerl.domains.lazy import lazy_names

__all__ = ["check_config", "generate_coding_rollout", "gold_answer", "load_problems", "validate", "verify_coding"]
__getattr__ = lazy_names(__name__, {"generate_coding_rollout": "rollout"})
