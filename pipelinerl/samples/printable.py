"""Makes text of a model safe and short enough for a terminal. Pure; called by `samples.text` and `samples.view`."""

from __future__ import annotations

# Spaces of other widths and the joiners of many scripts count as unprintable, but drive no terminal.
_KEPT = frozenset(
    "\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\u200c\u200d"
)


def escaped(text: str) -> str:
    """`text` with every control and formatting character (ESC, carriage return, changes of direction, ...) as an escape
    such as \\x1b. Line feeds stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" or each in _KEPT else repr(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """The same with line feeds as \\n."""
    return escaped(text).replace("\n", "\\n")


def shortened(text: str, limit: int) -> tuple[str, str, int]:
    """(beginning, end, number of characters between them that are left out): of at most `limit` characters; 0: all.

    Both ends are kept: an answer stands at the end, the question at the beginning.
    """
    cut = len(text) - limit
    if limit <= 0 or cut <= 0:
        return text, "", 0
    head = (limit + 1) // 2
    return text[:head], text[head + cut :], cut
