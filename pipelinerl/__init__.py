"""pipelinerl: asynchronous RL training of language models and agents with in-flight weight updates."""

import sys

__version__ = "0.1.0"

# So it reads while `python -m pipelinerl...` looks for the module that it is to run: the last moment for a message.
if sys.argv[:1] == ["-m"]:
    from pipelinerl.dependencies import open_standard_streams, require_core

    open_standard_streams()
    require_core()
