"""The salt of prefix-cache entries: the epoch of the weights in front of the caller's own salt. Pure."""

from __future__ import annotations

import re

_EPOCH = re.compile(r"^weights-epoch-\d+:")


def salt_for_epoch(salt: str | None, epoch: int) -> str:
    """`salt` with the epoch of the weights put in front, in place of an earlier epoch."""
    own = _EPOCH.sub("", salt or "", count=1)
    return f"weights-epoch-{epoch}:{own}"
