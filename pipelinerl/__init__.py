"""pipelinerl: asynchronous RL training of language models and agents with in-flight weight updates."""

import sys
from typing import TYPE_CHECKING

from pipelinerl.version import __version__ as __version__

if TYPE_CHECKING:
    from pipelinerl.api import Run as Run
    from pipelinerl.api import evaluate as evaluate
    from pipelinerl.api import train as train

# So it reads while `python -m pipelinerl...` looks for the module that it is to run: the last moment for a message.
if sys.argv[:1] == ["-m"]:
    from pipelinerl.dependencies import open_standard_streams, require_core

    open_standard_streams()
    require_core()


def __getattr__(name: str) -> object:
    """`train`, `evaluate` and `Run` of `pipelinerl.api`, which is loaded with the first of them."""
    if name in ("train", "evaluate", "Run"):
        from importlib import import_module

        return getattr(import_module("pipelinerl.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
