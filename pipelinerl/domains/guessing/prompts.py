"""The words of the guessing game: what the model is told, and how its answer is read.

Called by the rollout, and by the tiny model's warm-up, which has to use the same words. Pure; waits for nothing.
"""

import re
from collections.abc import Sequence

SYSTEM_PROMPT = "You are a helpful assistant"
WRONG_OUTPUT = "<wrong output>"
_ANSWER = re.compile(r"<answer>(\d+)</answer>")
# Python refuses to parse integers of more than 4300 digits, and no game needs more than these.
_MAX_DIGITS = 18

Message = dict[str, str]


def instruction(low: int, high: int) -> str:
    """Return the rules of the game for numbers in ``low..high`` (both inclusive)."""
    return (
        f"You must guess a number between {low} and {high}. Output the answer as <answer>number</answer>."
        " After each guess I will tell you if your answer is higher or lower than the target number."
    )


def feedback(history: Sequence[int | None], answer: int) -> str:
    """Return the message that lists the guesses so far; ``None`` in ``history`` stands for a wrong output."""
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
    """Return the output that states ``guess``."""
    return f"<answer>{guess}</answer>"


def parse_answer(text: str) -> int | None:
    """Return the first stated guess in ``text``, or ``None`` when there is no well-formed one."""
    found = _ANSWER.search(text)
    if found is None or len(found.group(1)) > _MAX_DIGITS:
        return None
    return int(found.group(1))
