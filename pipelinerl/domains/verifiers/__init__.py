"""Environments of the package verifiers as domains: any of them by its id or its class, with its own rubric."""

from pipelinerl.domains.lazy import lazy_names
from pipelinerl.domains.verifiers.problems import load_problems

__all__ = ["generate_verifiers_rollout", "load_problems"]
__getattr__ = lazy_names(__name__, {"generate_verifiers_rollout": "rollout"})
