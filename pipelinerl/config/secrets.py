"""No secret in the configuration, because the configuration is saved and sent to trackers.

`refuse_secrets` is for what is certainly one; `redact` hides what may be one from trackers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.errors import ConfigError

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(api[_\-]?key|password|passwd|secret|credentials?|private[_\-]?key|(auth|access|api|hf|bearer)[_\-]?token)$"
    r"|(^|\.)token$",
    re.I,
)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_MIN_SECRET_LENGTH = 12
# Values that pipelinerl itself takes from the environment.
_OWN_VARIABLES = {"streams.url": "PIPELINERL_REDIS_URL"}
HIDDEN = "***"
_MAYBE_SECRET = re.compile(r"(^|[_-])(token|secret|password|passwd|api_?key|credentials?|authorization)$", re.I)
_URL_USER = re.compile(r"(?P<start>\b[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.I)
_NEXT_STEP = "Put it into an environment variable and read that variable in your code; the configuration is saved."


def refuse_secrets(data: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` (which does not show the value) if a value is a secret.

    A value counts as one if its key is called like one (`api_key`, `password`, `token`, ...), if it is a URL with a
    password, or if it contains the value of an environment variable that is called like one.
    """
    secrets = {
        value: name
        for name, value in environ.items()
        if len(value) >= _MIN_SECRET_LENGTH and _SECRET_VARIABLE.search(name)
    }
    for key, value in _texts(data, ""):
        if not value:
            continue
        if _SECRET_NAME.search(key):
            raise ConfigError(key, "(hidden)", "no secret in the configuration", _next_step(key))
        if _has_password(value):
            raise ConfigError(key, "(hidden)", "a URL without a password", _next_step(key))
        for secret, name in secrets.items():
            if secret in value:
                raise ConfigError(key, f"(the value of ${name})", "no secret in the configuration", _next_step(key))


def redact(value: Any) -> Any:
    """Return a copy of plain data in which values of secret keys, and user names and passwords in URLs, are `***`."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if item and isinstance(key, str) and _MAYBE_SECRET.search(key) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _URL_USER.sub(rf"\g<start>{HIDDEN}@", value)
    return value


def _next_step(key: str) -> str:
    own = _OWN_VARIABLES.get(key)
    if own is None:
        return _NEXT_STEP
    return (
        f"Leave {key} out and put the whole address into the environment variable {own} (on every node); the "
        "configuration is saved."
    )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _texts(item, f"{key}.{position}")
    elif isinstance(value, str):
        yield key, value


def _has_password(text: str) -> bool:
    if "://" not in text:
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.password) or "password=" in parts.query
    except ValueError:
        return False
