"""`python -m pipelinerl COMMAND`: a table of commands, each a module in `pipelinerl.commands` with `main(argv) -> int`.

Loads nothing but the chosen command, so that the help is instant.
"""

from __future__ import annotations

import signal
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from pipelinerl.dependencies import DEPENDENCIES, missing_message
from pipelinerl.errors import EXIT_USER_ERROR, UserError

_COMMANDS = {
    "launch": "start a run (also: python -m pipelinerl.launch)",
    "tiny-model": "build the small model of the quickstart",
    "check-domain": "import your rollout function and data sets and check their shapes",
    "status": "show what the processes of a run are doing",
    "audit": "account for every sample of a run",
    "samples": "show what the model said in a run",
    "replay": "train a run again from its recorded streams and compare",
    "pool": "list, add and remove the servers of a running run",
}


def available_commands() -> dict[str, str]:
    """Return the commands that this installation has, with a line about each."""
    return {name: line for name, line in _COMMANDS.items() if find_spec(_module(name)) is not None}


def main(argv: list[str]) -> int:
    """Run one command and return its exit code; 2 for a mistake on the command line, 130 for Ctrl-C."""
    commands = available_commands()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(commands))
        return 0 if argv else EXIT_USER_ERROR
    name, *rest = argv
    if name not in commands:
        near = get_close_matches(name, list(commands), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "See python -m pipelinerl --help."
        print(f"command: got {name!r}, expected one of {', '.join(commands)}. {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        code: int = import_module(_module(name)).main(rest)
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


def _module(name: str) -> str:
    return "pipelinerl.commands." + name.replace("-", "_")


def _usage(commands: dict[str, str]) -> str:
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {line}" for name, line in commands.items()]
    return "\n".join(["usage: python -m pipelinerl COMMAND [ARGUMENT ...]", "", *lines, "", "Each has its own --help."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
