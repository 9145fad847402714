"""Public names for text games: mark a class with `@text_game`, then `await play(cfg, llm, problem, session, Game)`.

Also imported in sandboxed processes, so what only rollouts and services use is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipelinerl.sandbox.protocol import GameStep, TextGame, text_game

if TYPE_CHECKING:
    from pipelinerl.domains.text_game import play
    from pipelinerl.sandbox.service import create_app
    from pipelinerl.sandbox.services import current_environments

__all__ = ["GameStep", "TextGame", "create_app", "current_environments", "play", "text_game"]
_LATE = {
    "create_app": "pipelinerl.sandbox.service",
    "current_environments": "pipelinerl.sandbox.services",
    "play": "pipelinerl.domains.text_game",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
