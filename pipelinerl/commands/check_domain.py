"""`python -m pipelinerl check-domain`: compose a configuration and check its rollout function and data sets.

Called by `pipelinerl.__main__`. Starts no servers; waits for the data sets to load.
"""

from __future__ import annotations

import argparse
import sys

_EPILOG = "The arguments are those of python -m pipelinerl.launch: --config-dir, --config-name and overrides."


def main(argv: list[str]) -> int:
    """Print what was found and return 0; a mistake is a `UserError` with what to change."""
    if not argv or argv[0] in ("-h", "--help"):
        argparse.ArgumentParser(
            prog="python -m pipelinerl check-domain",
            usage="%(prog)s [--config-dir DIR] [--config-name NAME] [key=value ...]",
            description="Import actor.rollout_policy and dataset_loader, load the data sets, and check their shapes.",
            epilog=_EPILOG,
        ).print_help()
        return 0
    from pipelinerl.config.compose import compose

    # The check writes nothing, but a configuration is complete only with a run directory.
    composed = compose([*argv, "++output_dir=unused"] if not any("output_dir=" in word for word in argv) else argv)
    if composed.config is None:
        print(composed.help_text)
        return 0
    sys.path[:0] = [str(folder) for folder in composed.search_dirs]
    from pipelinerl.domains.check import check_domain

    print(check_domain(composed.config))
    return 0
