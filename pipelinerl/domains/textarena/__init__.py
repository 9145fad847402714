"""Games of the package textarena for one player, by their ids."""

from pipelinerl.domains.lazy import lazy_names
from pipelinerl.domains.textarena.problems import load_problems

__all__ = ["generate_textarena_rollout", "load_problems"]
__getattr__ = lazy_names(__name__, {"generate_textarena_rollout": "rollout"})
