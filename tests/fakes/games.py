"""Games that behave and misbehave, for tests of the environment service. Found there through PYTHONPATH."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from pipelinerl.games import GameStep, text_game


@text_game
class Echo:
    """Says what it hears; the number of moves is the reward at the end. Some moves do what they say."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self._left = int(problem["moves"])
        self._moves = 0
        self._first = str(problem.get("first", "go"))

    def start(self) -> str:
        return self._first

    def act(self, action: str) -> GameStep:
        self._moves += 1
        if action == "raise":
            raise ValueError("no such move")
        if action == "spin":
            while True:
                pass
        if action == "block":
            # What cannot be interrupted: the process has to be killed.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(3600)
        if action == "die":
            os._exit(7)
        if action == "nan":
            return GameStep("", float("nan"), done=True)
        if action == "numpy":
            return GameStep("n", np.float32(0.5), done=np.bool_(False), valid=np.bool_(True))  # type: ignore[arg-type]
        if action == "none":
            return None  # type: ignore[return-value]
        if action == "secret":
            return GameStep(str("PIPELINERL_SERVER_TOKEN" in os.environ), 0.0, done=False)
        done = self._moves == self._left
        return GameStep(f"{action} {self._moves}", float(self._moves) if done else 0.0, done)

    def close(self) -> None:
        """Nothing is held."""


def not_a_game(problem: dict[str, Any]) -> None:
    """Has no mark."""
