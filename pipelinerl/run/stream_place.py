"""Which Redis server holds a run's streams: written down at the first start, compared at every later one.

Called by the launcher's session and by commands that open a run. An address that comes from the environment is in no
configuration, and a run that goes on with another server would find its streams empty. Waits for nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import REDIS_URL_KEY
from pipelinerl.streams.redis_client import shown

PLACE_FILE = "redis_server"
_OWN = "the run's own server"
_DATA_BASE = re.compile(r"[?&]db=(\d+)(?:&|$)")


def check_place(run_dir: RunDir, url: str | None) -> None:
    """Refuse another server than the one that holds the records of this run.

    Args:
        run_dir: of the run.
        url: of the server that is about to be used; None: one of the run's own.

    Raises:
        ConfigError: the records are elsewhere; it shows both addresses without their passwords.
    """
    file = _file(run_dir)
    known = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    place = _place(url)
    if known is None or known == place:
        return
    if known == _OWN:
        next_step = f"Unset {REDIS_URL_KEY} and leave streams.url out."
    else:
        next_step = f"Set streams.url as before, or {REDIS_URL_KEY} in the environment if the address has a password."
    raise ConfigError("streams.url", place, f"{known}, which holds the records of {run_dir.root}", next_step)


def remember_place(run_dir: RunDir, url: str | None) -> None:
    """Write down which server holds the records, without its password."""
    file = _file(run_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_place(url) + "\n", encoding="utf-8")


def _file(run_dir: RunDir) -> Path:
    return run_dir.streams / PLACE_FILE


def _place(url: str | None) -> str:
    if url is None:
        return _OWN
    # The only option that makes it another place.
    number = _DATA_BASE.search(url)
    return shown(url) if number is None else f"{shown(url)}?db={number[1]}"
