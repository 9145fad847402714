"""Problems of the guessing game: the numbers to find, and the guesses that a game may start with.

Called by the actor through ``dataset_loader``; ``dataset_loader_params`` become keyword arguments. Waits for nothing.
"""

import random
from collections.abc import Sequence
from typing import Any

DEFAULT_HIGH = 1024
DEFAULT_MAX_TURNS = 13
HISTORIES = ("list", "chat")
_DATASETS = ("train", "test")
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
    """Return the problems of the named data sets (``train`` and ``test``).

    Args:
        dataset_names: any of ``train`` and ``test``.
        n: numbers are in ``1..n``.
        max_turns: guesses that a rollout may make.
        opening_guesses: 0 gives one problem a number, half of the numbers being held out for testing. Above 0, each
            game starts with that many wrong guesses already made, and whole games are held out instead of numbers: a
            policy trained on half of the numbers learns which numbers can be answers, and gets worse at the others.
        num_train: at most this many training problems (default: all, or 1024 with opening guesses).
        num_test: at most this many test problems (default: all, or 512 with opening guesses).
        seed: draws the games with opening guesses; it does not matter without them.
        history: ``list`` tells the model its guesses so far in one message, ``chat`` as a dialogue.

    Raises:
        ValueError: a name is unknown, or the numbers do not allow that many different games.
    """
    for name in dataset_names:
        if name not in _DATASETS:
            raise ValueError(
                f"guessing: unknown data set {name!r}; expected one of {list(_DATASETS)}. "
                "Change train_dataset_names or test_dataset_names."
            )
    if n < 2 or max_turns < 1 or not 0 <= opening_guesses < n:
        raise ValueError(
            f"guessing: got n={n}, max_turns={max_turns}, opening_guesses={opening_guesses}; "
            "expected n >= 2, max_turns >= 1 and 0 <= opening_guesses < n. Change dataset_loader_params."
        )
    if history not in HISTORIES:
        raise ValueError(
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


Game = tuple[int, tuple[int, ...]]


def _split_by_number(n: int, num_train: int | None, num_test: int | None) -> dict[str, list[Game]]:
    train: list[Game] = [((2 * i * _MULTIPLIER) % n + 1, ()) for i in range(n // 2)]
    test: list[Game] = [(((2 * i + 1) * _MULTIPLIER) % n + 1, ()) for i in range(n // 2)]
    return {"train": train[:num_train], "test": test[:num_test]}


def _split_by_game(
    n: int, opening_guesses: int, num_train: int | None, num_test: int | None, seed: int
) -> dict[str, list[Game]]:
    """Draw different games (answer and set of opening guesses); the first ones drawn are the test set."""
    num_train = 1024 if num_train is None else num_train
    num_test = 512 if num_test is None else num_test
    wanted = num_train + num_test
    possible = n
    for k in range(opening_guesses):
        possible = possible * (n - 1 - k) // (k + 1)
    # Drawing without repetition needs some room to stay quick.
    if wanted > possible * 3 // 4:
        raise ValueError(
            f"guessing: num_train + num_test = {wanted}, but n={n} and opening_guesses={opening_guesses} allow "
            f"{possible} different games; expected at most three quarters of them. Raise n or opening_guesses."
        )
    rng = random.Random(seed)
    numbers = range(1, n + 1)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    games: list[Game] = []
    while len(games) < wanted:
        answer, *opening = rng.sample(numbers, opening_guesses + 1)
        key = (answer, tuple(sorted(opening)))
        if key not in seen:
            seen.add(key)
            games.append((answer, tuple(opening)))
    return {"test": games[:num_test], "train": games[num_test:]}
