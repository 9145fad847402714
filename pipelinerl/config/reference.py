"""Keys of the reference that our schema does not have: taken out with a note where they do nothing, else refused.

Called by the composition, before validation.
"""

from __future__ import annotations

from typing import Any


def is_reference_key(key: str) -> bool:
    """True for a key that `take_reference_keys` answers for."""
    return False


def take_reference_keys(data: dict[str, Any]) -> list[str]:
    """Remove keys that do nothing from `data` and return a note for each; raise ConfigError for refused ones."""
    return []
