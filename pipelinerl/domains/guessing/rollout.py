"""One game of guessing: ask the model, compare, tell it, until it is right, out of turns, or badly formatted.

Called by the actor for every attempt at a problem. Waits for the model's answer to each turn.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.guessing.problems import DEFAULT_HIGH, DEFAULT_MAX_TURNS
from pipelinerl.domains.guessing.prompts import chat_messages, parse_answer, turn_messages
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


@dataclass
class Game:
    """State of one game. ``turn`` counts the model's own guesses; ``history`` also holds the opening ones."""

    answer: int
    low: int = 1
    high: int = DEFAULT_HIGH
    max_turns: int = DEFAULT_MAX_TURNS
    history: list[int | None] = field(default_factory=list)
    as_chat: bool = False
    turn: int = 0
    reward: float = 0.0
    success: bool = False
    wrong_output: bool = False

    @classmethod
    def from_problem(cls, problem: dict[str, Any]) -> "Game":
        """Read a problem; only ``answer`` is required."""
        return cls(
            answer=int(problem["answer"]),
            low=int(problem.get("low", 1)),
            high=int(problem.get("high", DEFAULT_HIGH)),
            max_turns=int(problem.get("max_turns", DEFAULT_MAX_TURNS)),
            history=list(problem.get("opening_guesses", ())),
            as_chat=problem.get("history") == "chat",
        )

    @property
    def over(self) -> bool:
        """True when no further guess is to be made."""
        return self.success or self.wrong_output or self.turn >= self.max_turns

    def messages(self) -> list[dict[str, str]]:
        """Return the chat of the current turn."""
        messages = chat_messages if self.as_chat else turn_messages
        return messages(self.low, self.high, self.history, self.answer)

    def play(self, output_text: str) -> None:
        """Take the model's output of the current turn and set reward and state.

        A right guess at turn i (from 0) is worth ``2 - i/10``, a wrong output ``-2 + i/10`` and ends the game: playing
        well-formed first turns is worth something. A game that runs out of turns is worth 0.
        """
        guess = parse_answer(output_text)
        if guess is None:
            self.reward = -2 + self.turn / 10
            self.wrong_output = True
        elif guess == self.answer:
            self.reward = 2 - self.turn / 10
            self.success = True
        self.history.append(guess)
        self.turn += 1


async def generate_guessing_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Play one game and return one training text a turn, each with the reward of the whole game."""
    started = time.monotonic()
    game = Game.from_problem(problem)
    llm_calls = []
    while not game.over:
        llm_call = await llm_async_generate(llm, Prompt(messages=game.messages()), session)
        llm_calls.append(llm_call)
        game.play(llm_call.output.content or "")
    training_texts = [make_training_text(llm, llm_call) for llm_call in llm_calls]
    for text in training_texts:
        text.reward = game.reward
    metrics = BaseMetrics(
        reward=game.reward,
        success=game.success,
        no_error=not game.wrong_output,
        no_answer=game.wrong_output,
    )
    return RolloutResult(
        training_texts=training_texts,
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem["dataset"],
    )
