"""pipelinerl: asynchronous RL training of language models and agents with in-flight weight updates."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelinerl.api import Run as Run
    from pipelinerl.api import evaluate as evaluate
    from pipelinerl.api import train as train
    from pipelinerl.version import __version__ as __version__

# So it reads while `python -m pipelinerl...` looks for the module that it is to run: the last moment for a message.
if sys.argv[:1] == ["-m"]:
    from pipelinerl.dependencies import open_standard_streams, require_core

    open_standard_streams()
    require_core()


def __getattr__(name: str) -> object:
    """The version, and `train`, `evaluate` and `Run` of `pipelinerl.api`, which is loaded with the first of them."""
    module = {"__version__": "version", "train": "api", "evaluate": "api", "Run": "api"}.get(name)
    if module is not None:
        from importlib import import_module

        return getattr(import_module(f"pipelinerl.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
