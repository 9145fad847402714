"""Makes plain data of what user code left in a rollout: whatever it is, it can be written into a record. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_LIMIT = 1 << 63


def plain_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Plain data of the same shape. What a record cannot hold becomes text: objects, NaN and infinities, integers of
    more than 64 bits; a half of a surrogate pair becomes a question mark.

    Raises:
        Exception: of any kind, if it is no dict, or contains itself.
    """
    if not metadata:
        return {}
    text = json.dumps(msgspec.to_builtins(metadata, enc_hook=str, str_keys=True), ensure_ascii=False)
    return dict(json.loads(encodable(text), parse_constant=str, parse_int=_integer))


def encodable(text: str) -> str:
    """`text` with question marks for halves of surrogate pairs, which no encoding can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def said(value: object) -> str:
    """`value` as text that can be written, whatever it is: exceptions of user code may have no text at all."""
    try:
        return encodable(str(value))
    except Exception:  # noqa: BLE001 - code of the user's
        return f"<{type(value).__name__} without a text>"


def _integer(digits: str) -> int | str:
    # The longest integer of 64 bits has 19 digits and a sign.
    number = int(digits) if len(digits) <= 20 else None
    return number if number is not None and -_LIMIT <= number < _LIMIT else digits
