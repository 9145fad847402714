"""A folder for the sockets inside servers, that goes with the run.

Called by the launcher around its processes. The parts of a vLLM server talk over Unix sockets in the folder for
temporary files, three or so a server, and nobody removes those of a server that is killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Where vLLM creates them.
FOLDER_KEY = "VLLM_RPC_BASE_PATH"
#: What a socket's whole path may have on Linux (`sun_path` with its end), and the name of one of vLLM's.
_LONGEST_PATH, _NAME = 107, len("/00000000-0000-0000-0000-000000000000")


@contextmanager
def server_sockets(environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """`environ` with a folder that is removed in the end; unchanged if the user named one, or none can be made or is
    short enough."""
    made = None if environ.get(FOLDER_KEY) else _make()
    if made is None:
        yield environ
        return
    with made as folder:
        is_short = len(folder.encode()) + _NAME <= _LONGEST_PATH
        yield {**environ, FOLDER_KEY: folder} if is_short else environ


def _make() -> tempfile.TemporaryDirectory[str] | None:
    try:
        return tempfile.TemporaryDirectory(prefix="pipelinerl-", ignore_cleanup_errors=True)
    except OSError:
        return None
