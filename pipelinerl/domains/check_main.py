"""`python -m pipelinerl.domains.check_main --run-config FILE`: check a run's user code, in a process of its own.

Started by the launcher before anything else. Exit code 0: it can be used; 2: the message on stderr says why not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import EXIT_USER_ERROR, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Check the user code named by a resolved configuration file and return the exit code."""
    parser = argparse.ArgumentParser(description="Check the dataset loader and the rollout function of a run.")
    parser.add_argument("--run-config", required=True, type=Path, help="resolved configuration (YAML)")
    arguments = parser.parse_args(argv)

    from pipelinerl.config.load import load_config
    from pipelinerl.domains.check import check_domain

    try:
        sys.stdout.write(check_domain(load_config(arguments.run_config)) + "\n")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
