"""Which node of a run this is, when SLURM's `srun` started the launcher on each of several. Pure; used by `cluster`.

A step of a job has variables that neither the script of `sbatch` nor the shell of `salloc` has (`SLURM_STEP_*`), though
both see the whole allocation in theirs (`SLURM_JOB_*`). So only a step over several nodes is a start on several nodes.
Read here rather than in a script, because a container has `srun`'s environment but not `scontrol`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from pipelinerl.errors import ConfigError

NODE_HOSTS_KEY = "PIPELINERL_NODE_HOSTS"
_HOSTS = "SLURM_STEP_NODELIST"
_OWN_RANK = "set WORLD_SIZE, RANK and PIPELINERL_NODE_HOSTS yourself, or WORLD_SIZE=1 for a run on each node"
# Commas and plain characters outside of brackets, and what is in brackets.
_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def with_slurm_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ`, with WORLD_SIZE, RANK and the nodes' addresses if this is one task of each node of a SLURM step.

    What is set already stays: with WORLD_SIZE or RANK nothing is added, PIPELINERL_NODE_HOSTS replaces SLURM's names.

    Raises:
        ConfigError: the step has several nodes and not one task on each, or a variable is missing.
    """
    if not is_slurm_step(environ):
        return environ
    nodes = int(environ["SLURM_STEP_NUM_NODES"])
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks != str(nodes):
        raise ConfigError(
            "SLURM_STEP_NUM_TASKS",
            tasks or None,
            f"{nodes}, one task for each node: the launcher starts the processes of its node itself",
            f"Start it by `srun --ntasks-per-node=1`, or {_OWN_RANK}.",
        )
    hosts = environ.get(NODE_HOSTS_KEY, "").strip() or ",".join(hosts_of(environ.get(_HOSTS, "")))
    rank = environ.get("SLURM_NODEID", "").strip()
    if not rank:  # no node may take itself for the first one
        expected = f"the number of this node in the step, 0 to {nodes - 1}"
        raise ConfigError("SLURM_NODEID", None, expected, f"Pass SLURM's variables on, or {_OWN_RANK}.")
    return {**environ, "WORLD_SIZE": str(nodes), "RANK": rank, NODE_HOSTS_KEY: hosts}


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this on several nodes, and nobody said otherwise.

    A terminal (`srun --pty`) is one task's alone, so what is typed there starts on one node.
    """
    if any(environ.get(key, "").strip() for key in ("WORLD_SIZE", "RANK")) or "SLURM_PTY_PORT" in environ:
        return False
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    return nodes.isdecimal() and int(nodes) > 1


def hosts_of(hostlist: str) -> list[str]:
    """The names in SLURM's notation, in its order: `gpu[08-10,12],login-1` has five. Zeros in front stay.

    The notation is that of `scontrol show hostnames`: commas separate names; brackets hold numbers and ranges, in one
    name several times if need be (the last one counts fastest).

    Raises:
        ConfigError: it is something else.
    """
    entries = _ENTRY.findall(hostlist)
    if not entries or ",".join(entries) != hostlist:
        raise _unreadable(hostlist)
    return [host for entry in entries for host in _names(entry, hostlist)]


def _names(entry: str, hostlist: str) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", entry)  # plain, bracket, plain, ...
    choices = [_numbers(part, hostlist) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(bracket: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _unreadable(hostlist)
        first, last = found.group(1), found.group(2) or found.group(1)
        if int(last) < int(first):
            raise _unreadable(hostlist)
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(hostlist: str) -> ConfigError:
    next_step = f"Correct it, or {_OWN_RANK}."
    return ConfigError(_HOSTS, hostlist or None, "names of nodes as `gpu[01-04],login-1`", next_step)
