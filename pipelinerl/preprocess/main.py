"""Main of the preprocessor process: `python -m pipelinerl.preprocess.main --run-dir DIR --job NAME`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pipelinerl.role import run_role

if TYPE_CHECKING:
    from pipelinerl.role import RoleContext


def main(context: RoleContext) -> None:
    from pipelinerl.preprocess.loop import preprocess

    preprocess(context)


if __name__ == "__main__":
    sys.exit(run_role(main))
