"""Whether a run that is on disk has trained a step: what was never trained cannot be spoiled by another configuration.

Called by `workspace` before it refuses a change. Reads files only, and is careful: whatever it cannot tell counts as
trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import StreamError
from pipelinerl.records import StepDone, TrainerMessage
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import TRAINER_TOPIC, StreamSpec
from pipelinerl.streams.file_reader import FileReader
from pipelinerl.streams.layout import list_shards, partition_dir

_TRAINER = StreamSpec(TRAINER_TOPIC, "finetune_0")


def has_trained(run_dir: RunDir, config: RunConfig) -> bool:
    """False if the run in `run_dir` certainly has no optimizer step behind it.

    Args:
        run_dir: of a run that nobody is running now.
        config: that it was started with. A stage without a trainer (`debug.mode`) has its records for a result, so
            that it always counts as trained.
    """
    if not has_stage(config, "finetune") or _has_weights(run_dir.finetune):
        return True
    steps = _summary_steps(run_dir.summary_file)
    if steps or config.streams.backend != "files":
        # Records in Redis are in a server that is not up: only the summary knows.
        return steps != 0
    return _has_step(partition_dir(run_dir.streams, _TRAINER))


def _has_weights(folder: Path) -> bool:
    """Whether there is a model or a training state. Hidden files are what ranks tell each other at their start."""
    return folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir())


def _summary_steps(file: Path) -> int | None:
    """The steps of all starts so far; None if the last one did not come to count them."""
    try:
        steps = json.loads(file.read_text(encoding="utf-8")).get("steps")
    except (OSError, ValueError, AttributeError):
        return None
    return steps if isinstance(steps, int) else None


def _has_step(directory: Path) -> bool:
    if not list_shards(directory):
        return False
    reader = FileReader[Any](directory, TrainerMessage)
    try:
        while entries := reader.read(timeout_s=0):
            if any(isinstance(entry.record, StepDone) for entry in entries):
                return True
    except StreamError:
        return True
    finally:
        reader.close()
    return False
