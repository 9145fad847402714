"""`RunIdentity`: what makes a run directory one run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.rundir.durable import replace_file

_MAX_NAMED = 3


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`incarnation` counts the starts of the same run from 0."""

    run_id: str
    incarnation: int


def read_identity(file: Path) -> RunIdentity:
    """Read `conf/run.json`; ConfigError if there is none or it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunIdentity)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            "run directory",
            str(file.parent.parent),
            f"a started run ({file} is missing)",
            f"Give the output_dir of a run{_runs_in(file.parent.parent)}.",
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            "run directory",
            str(file),
            f"the identity of a run ({error})",
            "The file is damaged: use another output_dir.",
        ) from error


def _runs_in(folder: Path) -> str:
    """The newest runs below a folder that is none itself, as a remark."""
    files = sorted(folder.glob("*/conf/run.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [str(file.parent.parent) for file in files[:_MAX_NAMED]]
    return f", for instance {' or '.join(names)}" if names else ""


def write_identity(file: Path, identity: RunIdentity) -> None:
    """Write `conf/run.json` atomically."""
    replace_file(file, msgspec.json.encode(identity) + b"\n")
