"""`python -m pipelinerl COMMAND`: a table of commands.

Loads nothing but the chosen command, so that the help is instant.
"""

from __future__ import annotations

import signal
import sys
from difflib import get_close_matches
from importlib import import_module

from pipelinerl.dependencies import DEPENDENCIES, missing_message
from pipelinerl.errors import EXIT_USER_ERROR, UserError

#: Name -> (module with `main(argv) -> int`, one line of help).
_COMMANDS = {
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
    "view": ("pipelinerl.analysis.view.view_command", "show runs in the browser, while they go on and afterwards"),
    "replay": ("pipelinerl.analysis.replay", "train a run again from its recorded streams and compare"),
    "pool": ("pipelinerl.run.pool_command", "list, add and remove the servers of a running run"),
}


def main(argv: list[str]) -> int:
    """Run one command and return its exit code; 2 for a mistake on the command line, 130 for Ctrl-C."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else EXIT_USER_ERROR
    name, *rest = argv
    if name not in _COMMANDS:
        near = get_close_matches(name, list(_COMMANDS), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "See python -m pipelinerl --help."
        print(f"command: got {name!r}, expected one of {', '.join(_COMMANDS)}. {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        code: int = import_module(_COMMANDS[name][0]).main(rest)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        module = str(error.name).partition(".")[0]
        if module not in DEPENDENCIES:
            raise
        print(missing_message([module]), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def _usage() -> str:
    width = max(len(name) for name in _COMMANDS)
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in _COMMANDS.items()]
    return "\n".join(["usage: python -m pipelinerl COMMAND [ARGUMENT ...]", "", *lines, "", "Each has its own --help."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
