"""Text of token ids by one table, for byte-level tokenizers (GPT-2, Qwen, Llama 3 and others). Pure.

Made by the chat renderer. Every id of such a tokenizer stands for some bytes, and the text is those bytes one after the
other; looking them up takes a tenth of the time that the tokenizer needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer

# Ids whose text is compared with the tokenizer's own before the table is used.
_COMPARED_IDS = 64


class ByteText:
    """Decodes as `tokenizer.decode` does.

    Args:
        table: bytes of each id; empty for an id that has none.
        special: ids that are left out on request.
    """

    def __init__(self, table: list[bytes], special: frozenset[int]) -> None:
        self._all = table
        self._plain = [b"" if index in special else entry for index, entry in enumerate(table)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`; ids beyond the tokenizer are left out, broken UTF-8 becomes U+FFFD."""
        table = self._plain if skip_special_tokens else self._all
        try:
            joined = b"".join([table[index] for index in token_ids])
        except IndexError:
            joined = b"".join([table[index] for index in token_ids if index < len(table)])
        return joined.decode("utf-8", "replace")


def byte_text(tokenizer: Tokenizer) -> ByteText | None:
    """Return the table of a byte-level tokenizer; None for any other, or if a comparison with it fails."""
    settings = json.loads(tokenizer.to_str())
    if (settings.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_of = _byte_of_character()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        # A token with a character outside of the alphabet (an added one) stands for itself.
        known = all(character in byte_of for character in token)
        table[index] = bytes(byte_of[character] for character in token) if known else token.encode()
    special = frozenset(each["id"] for each in settings.get("added_tokens", []) if each["special"])
    made = ByteText(table, special)
    return made if _agrees(made, tokenizer, len(table), special) else None


def _agrees(made: ByteText, tokenizer: Tokenizer, size: int, special: frozenset[int]) -> bool:
    spread = list(range(0, size, max(1, size // _COMPARED_IDS)))
    ids = [*spread, *sorted(special)[:_COMPARED_IDS], *spread[::-1]]
    return all(
        made.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
        for skip in (True, False)
    )


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes are their own character, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
