"""Word problems in the format of GSM8K, for a run of `gsm8k` without a download: JSON lines with `question` and an
`answer` that ends in `#### NUMBER`.

    python scripts/word_problems.py results/words          # train.jsonl with 2,000 problems, test.jsonl with 256 others

Each has one to three steps of + - * / with small whole numbers. No question is in both files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = [
    "Ana",
    "Ben",
    "Chloe",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jack",
    "Kira",
    "Liam",
    "Maya",
    "Noah",
]
THINGS = [
    "apples",
    "books",
    "cards",
    "coins",
    "eggs",
    "marbles",
    "pens",
    "shells",
    "stamps",
    "stickers",
    "toys",
    "tickets",
]
BOXES = ["bags", "boxes", "baskets", "jars", "packs"]

Told = tuple[str, str, int]
#: A step tells what happens to `count` things; returns the sentence, the line of the solution, and the new count.
Step = Callable[[random.Random, str, str, int], Told]


def more(rng: random.Random, name: str, thing: str, count: int) -> Told:
    number = rng.randint(2, 20)
    new = count + number
    return f"{name} gets {number} more {thing}.", f"{count} + {number} = <<{count}+{number}={new}>>{new}", new


def fewer(rng: random.Random, name: str, thing: str, count: int) -> Told:
    if count < 3:
        return more(rng, name, thing, count)
    number = rng.randint(2, count - 1)
    new = count - number
    text = rng.choice((f"{name} gives away {number} {thing}.", f"{name} loses {number} of the {thing}."))
    return text, f"{count} - {number} = <<{count}-{number}={new}>>{new}", new


def times(rng: random.Random, name: str, thing: str, count: int) -> Told:
    number = rng.randint(2, 5)
    new = count * number
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[number]
    return (
        f"After a trade {name} has {word} as many {thing} as before.",
        f"{count} * {number} = <<{count}*{number}={new}>>{new}",
        new,
    )


def shared(rng: random.Random, name: str, thing: str, count: int) -> Told:
    parts = [number for number in range(2, 7) if count % number == 0 and count > number]
    if not parts:
        return more(rng, name, thing, count)
    number = rng.choice(parts)
    new = count // number
    return (
        f"{name} splits the {thing} equally into {number} {rng.choice(BOXES)} and keeps only one of these.",
        f"{count} / {number} = <<{count}/{number}={new}>>{new}",
        new,
    )


def draw_problem(rng: random.Random) -> dict[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        count = rng.randint(5, 40)
        told, solved = [f"{name} has {count} {thing}."], []
    else:
        boxes, each = rng.randint(2, 9), rng.randint(2, 12)
        count = boxes * each
        told = [f"{name} buys {boxes} {rng.choice(BOXES)} with {each} {thing} in each."]
        solved = [f"{boxes} * {each} = <<{boxes}*{each}={count}>>{count}"]
    steps: tuple[Step, ...] = (more, fewer, times, shared)
    for step in rng.choices(steps, weights=(3, 3, 1, 2), k=rng.randint(1, 2)):
        sentence, line, count = step(rng, name, thing, count)
        told.append(sentence)
        solved.append(line)
    question = f"{' '.join(told)} How many {thing} does {name} have now?"
    return {"question": question, "answer": "\n".join([*solved, f"#### {count}"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--test", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    drawn: dict[str, dict[str, str]] = {}
    while len(drawn) < args.train + args.test:
        problem = draw_problem(rng)
        drawn.setdefault(problem["question"], problem)
    rows = [json.dumps(problem) + "\n" for problem in drawn.values()]
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "train.jsonl").write_text("".join(rows[: args.train]))
    (args.folder / "test.jsonl").write_text("".join(rows[args.train :]))


if __name__ == "__main__":
    main()
