"""Environments of the package gymnasium that can be played in text, by their ids."""

from pipelinerl.domains.gymnasium_text.problems import load_problems
from pipelinerl.domains.lazy import lazy_names

__all__ = ["generate_gymnasium_text_rollout", "load_problems"]
__getattr__ = lazy_names(__name__, {"generate_gymnasium_text_rollout": "rollout"})
