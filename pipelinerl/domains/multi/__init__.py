"""A weighted mix of domains, with metrics for each of them."""

from pipelinerl.domains.lazy import lazy_names
from pipelinerl.domains.multi.problems import check_config, gold_answer, load_problems, validate

__all__ = ["check_config", "generate_multi_rollout", "gold_answer", "load_problems", "validate"]
__getattr__ = lazy_names(__name__, {"generate_multi_rollout": "rollout"})
