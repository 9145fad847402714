"""The guessing domain's problems and words, against values worked out by hand."""

import pytest

from pipelinerl.domains.guessing import feedback, load_problems, parse_answer, turn_messages


def test_default_problems_follow_the_formula() -> None:
    problems = load_problems(["train", "test"])
    train = [p["answer"] for p in problems if p["dataset"] == "train"]
    test = [p["answer"] for p in problems if p["dataset"] == "test"]
    # (2 * i * 191) % 1024 + 1 and ((2 * i + 1) * 191) % 1024 + 1
    assert train[:4] == [1, 383, 765, 123]
    assert test[:3] == [192, 574, 956]
    assert sorted(train + test) == list(range(1, 1025))
    assert len({p["id"] for p in problems}) == 1024
    assert problems[0]["max_turns"] == 13 and problems[0]["high"] == 1024


def test_only_the_named_data_sets_come_back() -> None:
    assert {p["dataset"] for p in load_problems(["test"])} == {"test"}
    assert load_problems([]) == []
    with pytest.raises(ValueError, match="unknown data set 'dev'"):
        load_problems(["dev"])


def test_games_with_opening_guesses_are_held_out_whole() -> None:
    params = {"n": 32, "max_turns": 5, "opening_guesses": 2, "num_train": 600, "num_test": 200, "seed": 3}
    problems = load_problems(["train", "test"], **params)
    games: dict[str, set[tuple[int, tuple[int, ...]]]] = {"train": set(), "test": set()}
    for problem in problems:
        assert len(set(problem["opening_guesses"])) == 2
        assert problem["answer"] not in problem["opening_guesses"]
        assert all(1 <= number <= 32 for number in [problem["answer"], *problem["opening_guesses"]])
        games[problem["dataset"]].add((problem["answer"], tuple(sorted(problem["opening_guesses"]))))
    assert len(games["train"]) == 600 and len(games["test"]) == 200
    assert not games["train"] & games["test"]
    # every number is an answer in training: nothing is held out by number
    assert {answer for answer, _ in games["train"]} == set(range(1, 33))


def test_the_split_does_not_depend_on_which_set_is_loaded() -> None:
    params = {"n": 32, "opening_guesses": 1, "num_train": 100, "num_test": 50}
    both = load_problems(["train", "test"], **params)
    assert [p for p in both if p["dataset"] == "test"] == load_problems(["test"], **params)
    assert load_problems(["test"], **params, seed=1) != load_problems(["test"], **params, seed=2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 8, "opening_guesses": 1, "num_train": 40, "num_test": 10}, "allow 56 different games"),
        ({"n": 1}, "expected n >= 2"),
        ({"max_turns": 0}, "expected n >= 2"),
        ({"n": 4, "opening_guesses": 4}, "opening_guesses=4"),
    ],
)
def test_impossible_parameters_are_explained(params: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_problems(["train"], **params)


def test_words_of_a_turn() -> None:
    messages = turn_messages(1, 1024, [], 7)
    assert messages == [
        {"role": "system", "content": "You are a helpful assistant"},
        {
            "role": "user",
            "content": "You must guess a number between 1 and 1024. Output the answer as <answer>number</answer>."
            " After each guess I will tell you if your answer is higher or lower than the target number.",
        },
    ]
    assert feedback([5, 9], 7) == (
        "Your 2 previous guesses:\n5, which is lower than the target number.\n"
        "9, which is higher than the target number."
    )
    # the mark of a wrong output stands where that output was, and nowhere else
    assert feedback([None, 9], 7) == (
        "Your 2 previous guesses:\n<wrong output>\n9, which is higher than the target number."
    )


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("<answer>17</answer>", 17),
        ("I say <answer>3</answer> or <answer>4</answer>", 3),
        ("<answer>17", None),
        ("<answer>-1</answer>", None),
        ("", None),
        ("<answer>" + "9" * 5000 + "</answer>", None),
    ],
)
def test_answers_are_read(text: str, guess: int | None) -> None:
    assert parse_answer(text) == guess
