"""`python -m pipelinerl check-domain NAME`: check a task's functions, data sets and gold answers, and try one rollout.

Called by `pipelinerl.__main__`. Starts no model; waits for the data sets to load and for the graders.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelinerl.config import RunConfig

_EPILOG = "The arguments are those of python -m pipelinerl.launch; NAME is short for --config-name NAME."


def main(argv: list[str]) -> int:
    """Print what was found and return 0; a mistake is a `UserError` with what to change."""
    if not argv or argv[0] in ("-h", "--help"):
        argparse.ArgumentParser(
            prog="python -m pipelinerl check-domain",
            usage="%(prog)s [NAME] [--config-dir DIR] [--config-name NAME] [key=value ...]",
            description="Import actor.rollout_policy and dataset_loader, load the data sets, check their shapes, grade "
            "the gold answers, and run one rollout against a server that answers as told.",
            epilog=_EPILOG,
        ).print_help()
        return 0
    from pipelinerl.config.compose import compose
    from pipelinerl.config.rules_run import missing_task

    words = argv if argv[0].startswith("-") or "=" in argv[0] else ["--config-name", *argv]
    # The check writes nothing, but a configuration is complete only with a run directory.
    words = words if any("output_dir=" in word for word in words) else [*words, "++output_dir=unused"]
    composed = compose(words)
    if composed.config is None:
        print(composed.help_text)
        return 0
    if (fault := missing_task(composed.config)) is not None:
        raise fault
    sys.path[:0] = [str(folder) for folder in composed.search_dirs]
    from pipelinerl.commands.time_limit import heeded_interrupts

    with heeded_interrupts():
        _check(composed.config)
    return 0


def _check(config: RunConfig) -> None:
    from pipelinerl.commands.dry_rollout import dry_rollout
    from pipelinerl.commands.time_limit import time_limit
    from pipelinerl.domains.check import check_answers, checked_problems
    from pipelinerl.run.preflight import DOMAIN_CHECK_TIMEOUT_S

    with time_limit(
        DOMAIN_CHECK_TIMEOUT_S,
        f"dataset_loader {config.dataset_loader}: importing the task and loading its problems",
        "A run would not start. Make it quicker.",
    ):
        problems = checked_problems(config)
    print(f"{len(problems.train)} training problems, {len(problems.test)} test problems", flush=True)
    print(check_answers(config, problems), flush=True)
    print(dry_rollout(config, problems.train[0]))
