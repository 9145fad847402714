"""The commands of `pipelinerl`, and what a user types to get one. Loads nothing of them."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import PurePath

#: Name -> (module with `main(argv) -> int`, one line of help).
COMMANDS = {
    "launch": ("pipelinerl.launch", "start a run (also: python -m pipelinerl.launch)"),
    "eval": ("pipelinerl.analysis.evaluate", "evaluate a model or a run: avg@k, pass@k, intervals"),
    "plan": ("pipelinerl.run.plan_command", "forecast memory, speed and disk of a run before it is started"),
    "tiny-model": ("pipelinerl.tiny.main", "build the small model of the quickstart"),
    "check-domain": (
        "pipelinerl.analysis.check_domain",
        "import your rollout function and data sets and check their shapes",
    ),
    "convert": ("pipelinerl.config.convert", "translate a configuration file of PipelineRL"),
    "status": ("pipelinerl.run.status", "show what the processes of a run are doing"),
    "audit": ("pipelinerl.analysis.audit", "account for every sample of a run"),
    "samples": ("pipelinerl.analysis.samples", "show what the model said in a run"),
    "view": ("pipelinerl.analysis.view.view_command", "show runs in the browser, live or afterwards"),
    "replay": ("pipelinerl.analysis.replay", "train a run again from its recorded streams and compare"),
    "pool": ("pipelinerl.run.pool_command", "list, add and remove the servers of a running run"),
    "completion": ("pipelinerl.shell_completion", "print the completion script of a shell"),
}


def typed(command: str = "") -> str:
    """What the user types for `command` (without one: for the program), as this process was started: `pipelinerl`, or
    `python -m pipelinerl`."""
    if PurePath(sys.argv[0]).name.removesuffix(".exe") == "pipelinerl":
        return f"pipelinerl {command}".rstrip()
    return "python -m pipelinerl.launch" if command == "launch" else f"python -m pipelinerl {command}".rstrip()


def whole_number(text: str) -> int:
    """The type of an option that counts from 0."""
    if not (text.isascii() and text.isdecimal()):
        raise ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """The type of an option that counts from 1."""
    if (number := whole_number(text)) == 0:
        raise ArgumentTypeError("expected a whole number of at least 1, got 0")
    return number
