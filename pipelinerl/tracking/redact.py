"""Hides secrets in a configuration before it leaves the machine. Called by the sinks; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_KEY = re.compile(r"(^|[_-])(token|secret|password|passwd|api_?key|credentials?|authorization)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<start>\b[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.IGNORECASE)


def redact(value: Any) -> Any:
    """Return a copy of plain data in which values of secret keys, and user names and passwords in URLs, are `***`."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key) and item else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\g<start>{HIDDEN}@", value)
    return value


def _is_secret(key: object) -> bool:
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None
