"""The command `completion`: print a script that completes commands, configurations and keys in bash, zsh or fish."""

from __future__ import annotations

import argparse
from shlex import quote

from pipelinerl.commands import COMMANDS, typed
from pipelinerl.config.key_table import GROUPS
from pipelinerl.config.keys import known_keys
from pipelinerl.config.load import conf_dir, config_names

#: Commands that take a configuration and keys; the others take folders.
_WITH_KEYS = ("launch", "eval", "plan", "check-domain")
_FLAGS = ("--config-name", "--config-dir", "--help")

_BASH = """\
_pipelinerl() {{
  local words=
  COMPREPLY=()
  if (( COMP_CWORD == 1 )); then words={commands}
  elif [[ $3 == --config-name ]]; then words={configs}
  elif [[ $2 == = || $3 == = ]]; then return
  else
    case ${{COMP_WORDS[1]}} in
      {with_keys}) words={keys}\\ {flags} ;;
      completion) words={shells} ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$2"))
  if [[ ${{COMPREPLY[0]-}} == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _pipelinerl pipelinerl
"""

_ZSH = """\
_pipelinerl() {{
  if (( CURRENT == 2 )); then
    local -a commands=({described})
    _describe command commands
  elif [[ ${{words[CURRENT-1]}} == --config-name ]]; then
    compadd -- {configs}
    _files
  elif [[ $PREFIX == *=* ]]; then
    compset -P '*='
    _files
  else
    case ${{words[2]}} in
      {with_keys})
        compadd -S '' -- {keys}
        compadd -- {flags} ;;
      completion) compadd -- {shells}; return ;;
    esac
    _files
  fi
}}
compdef _pipelinerl pipelinerl
"""


def main(argv: list[str]) -> int:
    """Print the script for the shell that `argv` names."""
    scripts = {"bash": bash, "zsh": zsh, "fish": fish}
    parser = argparse.ArgumentParser(
        prog=typed("completion"),
        description="Print the completion script of a shell.",
        epilog="bash and zsh: source <(pipelinerl completion bash) in ~/.bashrc or, after compinit, in ~/.zshrc with "
        "zsh for bash. fish: pipelinerl completion fish > ~/.config/fish/completions/pipelinerl.fish",
    )
    parser.add_argument("shell", choices=list(scripts))
    print(scripts[parser.parse_args(argv).shell](), end="")
    return 0


def bash() -> str:
    """For `complete -F`. A value after `key=` is completed as a file name."""
    return _BASH.format(
        commands=quote(" ".join(COMMANDS)),
        configs=quote(" ".join(_configs())),
        with_keys="|".join(_WITH_KEYS),
        keys=quote(" ".join(_keys())),
        flags=quote(" ".join(_FLAGS)),
        shells=quote("bash zsh fish"),
    )


def zsh() -> str:
    """For `compdef`."""
    return _ZSH.format(
        described=" ".join(quote(f"{name}:{line}") for name, (_, line) in COMMANDS.items()),
        configs=" ".join(_configs()),
        with_keys="|".join(_WITH_KEYS),
        keys=" ".join(_keys()),
        flags=" ".join(_FLAGS),
        shells="bash zsh fish",
    )


def fish() -> str:
    """One `complete` for each thing that can be said."""
    lines = [f"-n __fish_use_subcommand -f -a {name} -d {quote(line)}" for name, (_, line) in COMMANDS.items()]
    after = quote(f"__fish_seen_subcommand_from {' '.join(_WITH_KEYS)}")
    lines += [
        f"-n {after} -l config-name -x -a {quote(' '.join(_configs()))}",
        f"-n {after} -l config-dir -r",
        f"-n {after} -a {quote(' '.join(_keys()))}",
        "-n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'",
    ]
    return "".join(f"complete -c pipelinerl {line}\n" for line in lines)


def _configs() -> list[str]:
    return config_names(conf_dir())


def _keys() -> list[str]:
    return [f"{name}=" for name in sorted({*GROUPS, *(key.name for key in known_keys())})]
