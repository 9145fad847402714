"""`pipelinerl COMMAND`, or `python -m pipelinerl COMMAND`: starts the module that the table of commands names.

Loads nothing but the chosen command, so that the help is instant.
"""

from __future__ import annotations

import signal
import sys
from difflib import get_close_matches
from importlib import import_module

from pipelinerl.commands import COMMANDS, typed
from pipelinerl.dependencies import DEPENDENCIES, missing_message, open_standard_streams, require_core
from pipelinerl.errors import EXIT_USER_ERROR, UserError


def script() -> int:
    """The installed program `pipelinerl`."""
    open_standard_streams()
    require_core()
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run one command and return its exit code; 2 for a mistake on the command line, 130 for Ctrl-C."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else EXIT_USER_ERROR
    name, *rest = argv
    if name not in COMMANDS:
        near = get_close_matches(name, list(COMMANDS), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"See {typed()} --help."
        print(f"command: got {name!r}, expected one of {', '.join(COMMANDS)}. {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        code: int = import_module(COMMANDS[name][0]).main(rest)
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
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join([f"usage: {typed()} COMMAND [ARGUMENT ...]", "", *lines, "", "Each has its own --help."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
