"""Guess a number from "higher" and "lower": the smallest multi-turn task, used by the quickstart."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.data import check_names
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.llm.client import llm_async_generate, make_training_text
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.rollouts import BaseMetrics, RolloutResult

SYSTEM_PROMPT = "You are a helpful assistant"
WRONG_OUTPUT = "<wrong output>"
_ANSWER = re.compile(r"<answer>(\d+)</answer>")
# Python refuses to parse integers of more than 4300 digits, and no game needs more than these.
_MAX_DIGITS = 18

Message = dict[str, str]


def instruction(low: int, high: int) -> str:
    """Return the rules of the game for numbers in `low..high` (both inclusive)."""
    return (
        f"You must guess a number between {low} and {high}. Output the answer as <answer>number</answer>."
        " After each guess I will tell you if your answer is higher or lower than the target number."
    )


def feedback(history: Sequence[int | None], answer: int) -> str:
    """Return the message that lists the guesses so far; `None` in `history` stands for a wrong output."""
    lines = [f"Your {len(history)} previous guesses:"]
    for guess in history:
        if guess is None:
            lines.append(WRONG_OUTPUT)
        else:
            relation = "lower" if guess < answer else "higher"
            lines.append(f"{guess}, which is {relation} than the target number.")
    return "\n".join(lines)


def turn_messages(low: int, high: int, history: Sequence[int | None], answer: int) -> list[Message]:
    """Return the whole chat of one turn: system, rules and, after the first guess, the feedback."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": instruction(low, high)},
    ]
    if history:
        messages.append({"role": "user", "content": feedback(history, answer)})
    return messages


def chat_messages(low: int, high: int, history: Sequence[int | None], answer: int) -> list[Message]:
    """Return the same turn as a dialogue: each guess so far is an answer of the model, each hint a reply to it.

    Earlier guesses (opening ones too) then show the format of an answer, which small pretrained models need to see.
    """
    messages = turn_messages(low, high, (), answer)
    for guess in history:
        said = WRONG_OUTPUT if guess is None else format_answer(guess)
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": hint(guess, answer)})
    return messages


def hint(guess: int | None, answer: int) -> str:
    """Return the reply to one guess."""
    if guess is None:
        return WRONG_OUTPUT
    return f"{guess} is {'lower' if guess < answer else 'higher'} than the target number."


def format_answer(guess: int) -> str:
    """Return the output that states `guess`."""
    return f"<answer>{guess}</answer>"


def parse_answer(text: str) -> int | None:
    """Return the first stated guess in `text`, or `None` when there is no well-formed one."""
    found = _ANSWER.search(after_thinking(text))
    if found is None or len(found.group(1)) > _MAX_DIGITS:
        return None
    return int(found.group(1))


DEFAULT_HIGH = 1024
DEFAULT_MAX_TURNS = 13
HISTORIES = ("list", "chat")
# An odd multiplier visits the numbers in a scattered order; even steps are for training and odd ones for testing.
_MULTIPLIER = 191


def load_problems(
    dataset_names: Sequence[str],
    *,
    n: int = DEFAULT_HIGH,
    max_turns: int = DEFAULT_MAX_TURNS,
    opening_guesses: int = 0,
    num_train: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
    history: str = "list",
) -> list[dict[str, Any]]:
    """Return the problems of the named data sets (`train` and `test`).

    Args:
        dataset_names: any of `train` and `test`.
        n: numbers are in `1..n`.
        max_turns: guesses that a rollout may make.
        opening_guesses: 0 gives one problem a number, half of the numbers being held out for testing. Above 0, each
            game starts with that many wrong guesses already made, and whole games are held out instead of numbers: a
            policy trained on half of the numbers learns which numbers can be answers, and gets worse at the others.
        num_train: at most this many training problems (default: all, or 1024 with opening guesses).
        num_test: at most this many test problems (default: all, or 512 with opening guesses).
        seed: draws the games with opening guesses; it does not matter without them.
        history: `list` tells the model its guesses so far in one message, `chat` as a dialogue.

    Raises:
        DomainError: a name is unknown, or the numbers do not allow that many different games.
    """
    check_names("guessing", dataset_names)
    if n < 2 or max_turns < 1 or not 0 <= opening_guesses < n:
        raise DomainError(
            f"guessing: got n={n}, max_turns={max_turns}, opening_guesses={opening_guesses}; "
            "expected n >= 2, max_turns >= 1 and 0 <= opening_guesses < n. Change dataset_loader_params."
        )
    if history not in HISTORIES:
        raise DomainError(
            f"guessing: got history={history!r}; expected one of {list(HISTORIES)}. Change dataset_loader_params."
        )
    if opening_guesses == 0:
        by_name = _split_by_number(n, num_train, num_test)
    else:
        by_name = _split_by_game(n, opening_guesses, num_train, num_test, seed)
    problems = []
    for name in dataset_names:
        for answer, opening in by_name[name]:
            problems.append(_problem(name, n, max_turns, answer, opening) | {"history": history})
    return problems


def _problem(dataset: str, n: int, max_turns: int, answer: int, opening: tuple[int, ...]) -> dict[str, Any]:
    suffix = "".join(f"-{guess}" for guess in opening)
    return {
        "id": f"guessing-{n}-{answer}{suffix}",
        "dataset": dataset,
        "answer": answer,
        "low": 1,
        "high": n,
        "max_turns": max_turns,
        "opening_guesses": list(opening),
    }


_Opening = tuple[int, tuple[int, ...]]


def _split_by_number(n: int, num_train: int | None, num_test: int | None) -> dict[str, list[_Opening]]:
    train: list[_Opening] = [((2 * i * _MULTIPLIER) % n + 1, ()) for i in range(n // 2)]
    test: list[_Opening] = [(((2 * i + 1) * _MULTIPLIER) % n + 1, ()) for i in range(n // 2)]
    return {"train": train[:num_train], "test": test[:num_test]}


def _split_by_game(
    n: int, opening_guesses: int, num_train: int | None, num_test: int | None, seed: int
) -> dict[str, list[_Opening]]:
    """Draw different games (answer and set of opening guesses); the first ones drawn are the test set."""
    num_train = 1024 if num_train is None else num_train
    num_test = 512 if num_test is None else num_test
    wanted = num_train + num_test
    possible = n
    for k in range(opening_guesses):
        possible = possible * (n - 1 - k) // (k + 1)
    # Drawing without repetition needs some room to stay quick.
    if wanted > possible * 3 // 4:
        raise DomainError(
            f"guessing: num_train + num_test = {wanted}, but n={n} and opening_guesses={opening_guesses} allow "
            f"{possible} different games; expected at most three quarters of them. Raise n or opening_guesses."
        )
    rng = random.Random(seed)
    numbers = range(1, n + 1)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    games: list[_Opening] = []
    while len(games) < wanted:
        answer, *opening = rng.sample(numbers, opening_guesses + 1)
        key = (answer, tuple(sorted(opening)))
        if key not in seen:
            seen.add(key)
            games.append((answer, tuple(opening)))
    return {"test": games[:num_test], "train": games[num_test:]}


def gold_answer(problem: dict[str, Any]) -> str:
    """Return the output that wins at once."""
    return format_answer(int(problem["answer"]))


def validate(problem: dict[str, Any]) -> float:
    """Return 1 if the game reads the winning output as the answer, which lies in the problem's range."""
    answer = int(problem["answer"])
    in_range = problem.get("low", 1) <= answer <= problem.get("high", answer)
    return float(in_range and parse_answer(gold_answer(problem)) == answer)


@dataclass
class Game:
    """State of one game. `turn` counts the model's own guesses; `history` also holds the opening ones."""

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
    def from_problem(cls, problem: dict[str, Any]) -> Game:
        """Read a problem; only `answer` is required."""
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

        A right guess at turn i (from 0) is worth `2 - i/10`, a wrong output `-2 + i/10` and ends the game: playing
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
        game.play(llm_call.graded_text)
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
