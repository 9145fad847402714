"""Whether two processes read the same weights from a model folder. No torch.

Where updates bring an adapter alone, trainer and servers load the frozen model themselves, and a server that is started
again does so in mid run: a folder that changed meanwhile, or another one on another machine, would be another policy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipelinerl.weights.manifest import tensor_files

#: A file is read in so many places, evenly spread from its begin to its end; training changes weights everywhere.
PLACES = 64
PLACE_BYTES = 64 * 1024


def base_print(folder: Path | None) -> str | None:
    """A hash of names, sizes and samples of the weights in `folder`; None if it has none in safetensors format."""
    files = [] if folder is None else tensor_files(folder)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as content:
            for place in _places(size):
                content.seek(place)
                digest.update(content.read(PLACE_BYTES))
    return digest.hexdigest()


def _places(size: int) -> range | list[int]:
    if size <= PLACES * PLACE_BYTES:
        return range(0, size, PLACE_BYTES)
    return [(size - PLACE_BYTES) * number // (PLACES - 1) for number in range(PLACES)]
