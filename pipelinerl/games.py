"""Public names for text games: mark a class with `@text_game`, then `await play(cfg, llm, problem, session, Game)`.

Imported by user code, also inside game processes: the client of the servers is loaded with `play` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelinerl.sandbox.game_messages import GameStep, TextGame, text_game

if TYPE_CHECKING:
    from pipelinerl.domains.text_game import play

__all__ = ["GameStep", "TextGame", "play", "text_game"]


def __getattr__(name: str) -> Any:
    if name == "play":
        from pipelinerl.domains.text_game import play

        return play
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
