"""Rules of the run as a whole: a task, one actor, something to learn from. Called through `rules.validate`.

`missing_task` is no rule of the composition: files that others start from have no task. The launcher asks it before a
start, and the dry run says it.
"""

from __future__ import annotations

from pipelinerl.config.run import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import ConfigError

#: Some of the shipped experiments; `--help` lists all.
EXPERIMENTS = ("math", "guessing", "quickstart")


def missing_task(config: RunConfig) -> ConfigError | None:
    """Return what a run that makes rollouts lacks: a rollout function, or a loader of its problems."""
    if not has_stage(config, "actor"):
        return None
    for key, value, expected in (
        (
            "actor.rollout_policy",
            config.actor.rollout_policy,
            "the dotted path of a generate_rollout: there is no task",
        ),
        ("dataset_loader", config.dataset_loader, "the dotted path of a load_problems: there is no task"),
    ):
        if value is None:
            return ConfigError(
                key,
                value,
                expected,
                f"Start an experiment (--config-name {'|'.join(EXPERIMENTS)}, --help lists all), or set "
                "actor.rollout_policy and dataset_loader to functions of yours (docs/domains.md).",
            )
    return None


def greedy_training(config: RunConfig) -> ConfigError | None:
    """The most likely token has no distribution that it was sampled from."""
    if config.llm.parameters.temperature == 0:
        return ConfigError(
            "llm.parameters.temperature",
            config.llm.parameters.temperature,
            "more than 0: greedy outputs come from no distribution, so they cannot be trained on",
            "For greedy evaluation set test_llm.parameters.temperature=0.",
        )
    return None


RULES = (greedy_training,)
