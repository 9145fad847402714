"""Rows in the shapes of public data sets, with problems of our own. By domain and data set; gold answers are right."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

_DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_SOLUTION = "Half of $18$ is $9$, and so the number is $\\boxed{9}$."

#: name -> (rows, the tasks and answers that the first and the last row must give)
MATH: dict[str, tuple[list[Any], tuple[tuple[str, str], tuple[str, str]]]] = {
    "open_reasoner_zero_57k": (
        [
            [
                {"from": "human", "value": "Three boats hold 7 people each. How many people is that?"},
                {"from": "assistant", "ground_truth": {"value": "21", "pass_at_n": 0.5}},
            ],
            [
                {"from": "human", "value": "Find $x$ if $2x = \\sqrt{12}$."},
                {"from": "assistant", "ground_truth": {"value": "\\sqrt{3}"}},
            ],
        ],
        (
            ("Three boats hold 7 people each. How many people is that?", "21"),
            ("Find $x$ if $2x = \\sqrt{12}$.", "\\sqrt{3}"),
        ),
    ),
    "gsm8k_train": (
        [
            {"question": "Ira has 4 bags of 6 figs. How many figs?", "answer": "4 * 6 = <<4*6=24>>24 figs.\n#### 24"},
            {"question": "A car costs 9,000 and a van twice as much?", "answer": "It is double.\n#### 18,000"},
        ],
        (("Ira has 4 bags of 6 figs. How many figs?", "24"), ("A car costs 9,000 and a van twice as much?", "18000")),
    ),
    "math_train": (
        [
            {"problem": "Twice a number is 18.", "level": "Level 3", "type": "Algebra", "solution": _SOLUTION},
            {
                "problem": "Halve $\\pi$.",
                "level": "Level 1",
                "type": "Geometry",
                "solution": "\\boxed{\\frac{\\pi}{2}}",
            },
        ],
        (("Twice a number is 18.", "9"), ("Halve $\\pi$.", "\\frac{\\pi}{2}")),
    ),
    "math_500": (
        [
            {
                "problem": "Twice a number is 18.",
                "solution": _SOLUTION,
                "answer": "9",
                "subject": "Algebra",
                "level": 3,
                "unique_id": "test/algebra/1.json",
            },
            {
                "problem": "Name the point.",
                "solution": "So \\boxed{(3, \\pi)}",
                "answer": "(3, \\pi)",
                "subject": "Precalculus",
                "level": 5,
                "unique_id": "test/precalculus/2.json",
            },
        ],
        (("Twice a number is 18.", "9"), ("Name the point.", "(3, \\pi)")),
    ),
    "aime_2022": (
        [
            {"id": 0, "problem": "Add 3 and 4.", "solution": "It is 7.", "answer": "007", "url": "wiki/2022_AIME_I/1"},
            {"id": 1, "problem": "Not of that year.", "solution": "5", "answer": "5", "url": "wiki/2023_AIME_I/1"},
            {"id": 2, "problem": "Square 12.", "solution": "It is 144.", "answer": "144", "url": "wiki/2022_AIME_II/2"},
        ],
        (("Add 3 and 4.", "007"), ("Square 12.", "144")),
    ),
    "aime_2025": (
        [
            {"problem_idx": 1, "problem": "Add 30 and 40.", "answer": 70, "problem_type": ["Algebra"]},
            {"problem_idx": 2, "problem": "Double 294.", "answer": 588, "problem_type": ["Number Theory"]},
        ],
        (("Add 30 and 40.", "70"), ("Double 294.", "588")),
    ),
    "amc_2023": (
        [
            {"id": 0, "problem": "Add 100 and 42.", "answer": 142.0, "url": "wiki/2023_AMC_12A_Problems/Problem_1"},
            {"id": 1, "problem": "Not of that year.", "answer": 5.0, "url": "wiki/2022_AMC_12A_Problems/Problem_1"},
            {"id": 2, "problem": "Halve 1.", "answer": 0.5, "url": "wiki/2023_AMC_12B_Problems/Problem_2"},
        ],
        (("Add 100 and 42.", "142"), ("Halve 1.", "0.5")),
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k:train": (
        [
            {
                "data_source": "math_dapo",
                "prompt": [{"content": _DAPO.format("Count the sides of two squares."), "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "8", "style": "rule"},
                "extra_info": {"index": "a"},
            },
            {
                "data_source": "math_dapo",
                "prompt": [{"content": _DAPO.format("Take 40 from 6."), "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": ["-34"], "style": "rule"},
                "extra_info": {"index": "b"},
            },
        ],
        (("Count the sides of two squares.", "8"), ("Take 40 from 6.", "-34")),
    ),
    "dapo_17k": (
        [
            {"prompt": "Count the sides of two squares.", "solution": "8", "data_source": "math_dapo"},
            {"prompt": "Take 40 from 6.", "solution": "-34", "data_source": "math_dapo"},
        ],
        (("Count the sides of two squares.", "8"), ("Take 40 from 6.", "-34")),
    ),
    "deepscaler": (
        [
            {"problem": "Halve 3.", "answer": "\\frac{3}{2}", "solution": "It is $\\frac32$."},
            {"problem": "Twice a number is 18.", "answer": "9", "solution": _SOLUTION},
        ],
        (("Halve 3.", "\\frac{3}{2}"), ("Twice a number is 18.", "9")),
    ),
    "numina_math_cot": (
        [
            {
                "source": "olympiads",
                "problem": "Twice a number is 18.",
                "solution": _SOLUTION,
                "messages": [
                    {"role": "user", "content": "Twice a number is 18."},
                    {"role": "assistant", "content": _SOLUTION},
                ],
            },
            {"source": "olympiads", "problem": "Show that 2 is even.", "solution": "It is twice one.", "messages": []},
            {"source": "cn_k12", "problem": "Choose.", "solution": "That is $\\boxed{B}$.", "messages": []},
        ],
        (("Twice a number is 18.", "9"), ("Choose.", "B")),
    ),
    "numina_math_1_5": (
        [
            {"problem": "Halve 3.", "solution": "...", "answer": "1.5", "problem_type": "Algebra"},
            {"problem": "Show that 2 is even.", "solution": "...", "answer": "proof", "problem_type": "Number Theory"},
            {"problem": "Twice a number is 18.", "solution": _SOLUTION, "answer": "9", "problem_type": "Algebra"},
        ],
        (("Halve 3.", "1.5"), ("Twice a number is 18.", "9")),
    ),
    "eurus_train": (
        [
            {
                "data_source": "numina",
                "prompt": [
                    {"role": "system", "content": "Think in steps."},
                    {
                        "role": "user",
                        "content": "Halve 3.\n\nPresent the answer in LaTex format: \\boxed{Your answer}",
                    },
                ],
                "ability": "math",
                "reward_model": {"ground_truth": "1.5", "style": "rule"},
            },
            {"data_source": "apps", "prompt": [], "ability": "code", "reward_model": {"ground_truth": "{}"}},
            {
                "data_source": "numina",
                "prompt": [{"role": "user", "content": "Double 3."}],
                "ability": "math",
                "reward_model": {"ground_truth": "6", "style": "rule"},
            },
        ],
        (("Halve 3.", "1.5"), ("Double 3.", "6")),
    ),
    "gpqa_diamond": (
        [
            {"problem": "Which one? A. 1 B. 2", "solution": "\\boxed{B}", "domain": "Physics"},
            {"problem": "Which one? A. 3 B. 4", "solution": "\\boxed{A}", "domain": "Biology"},
        ],
        (("Which one? A. 1 B. 2", "B"), ("Which one? A. 3 B. 4", "A")),
    ),
    "chats/of-turns:train": (
        [
            {"conversations": [{"from": "human", "value": "6 times 7?"}, {"from": "gpt", "value": "\\boxed{42}"}]},
            {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2.\n#### 2"}]},
        ],
        (("6 times 7?", "42"), ("1+1?", "2")),
    ),
}

_TWICE_ON_STREAMS = "print(int(input()) * 2)"
_LARGEST = "class Solution:\n    def largest(self, xs: List[int]) -> int:\n        return max(xs)\n"
_LARGEST_STARTER = "class Solution:\n    def largest(self, xs: List[int]) -> int:\n        "


def _hidden(tests: list[Any]) -> str:
    """As LiveCodeBench keeps its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


#: name -> (rows, a right program for each; None: the row has one)
CODING: dict[str, tuple[list[Any], list[str | None]]] = {
    "mbpp": (
        [
            {
                "task_id": 1,
                "text": "Write a function to return a pair of numbers, the smaller one first.",
                "code": "def in_order(a, b):\r\n  return (min(a, b), max(a, b))",
                "test_list": ["assert in_order(2, 1) == (1, 2)", "assert in_order(1, 2) == (1, 2)"],
                "test_setup_code": "",
                "challenge_test_list": [],
            },
            {
                "task_id": 2,
                "prompt": "Write a function to find the length of the hypotenuse.",
                "code": "def hypotenuse(a, b):\n    return math.hypot(a, b)",
                "test_list": ["assert math.isclose(hypotenuse(3, 4), 5)"],
                "test_imports": ["import math"],
            },
        ],
        [None, None],
    ),
    "humaneval": (
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "from typing import List\n\n\ndef half(x: int) -> int:\n    return x // 2\n\n\n"
                'def halves(xs: List[int]) -> List[int]:\n    """ Half of each: [4] is [2].\n    """\n',
                "entry_point": "halves",
                "canonical_solution": "    return [half(x) for x in xs]\n",
                "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([4, 6]) == [2, 3]\n"
                "    assert candidate([]) == []\n",
            },
        ],
        [None],
    ),
    "livecodebench": (
        [
            {
                "question_title": "Twice",
                "question_content": "Print twice the number that is given.",
                "platform": "atcoder",
                "question_id": "a_1",
                "difficulty": "easy",
                "starter_code": "",
                "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
                "private_test_cases": _hidden([{"input": "-3\n", "output": "-6\n", "testtype": "stdin"}]),
                "metadata": "{}",
            },
            {
                "question_title": "Largest",
                "question_content": "Return the largest number.",
                "platform": "leetcode",
                "question_id": "1",
                "difficulty": "easy",
                "starter_code": _LARGEST_STARTER,
                "public_test_cases": json.dumps([{"input": "[1, 3, 2]", "output": "3", "testtype": "functional"}]),
                "private_test_cases": json.dumps([{"input": "[-1]", "output": "-1", "testtype": "functional"}]),
                "metadata": json.dumps({"func_name": "largest"}),
            },
        ],
        [_TWICE_ON_STREAMS, _LARGEST],
    ),
    "taco": (
        [
            {
                "question": "Print twice the number that is given.",
                "solutions": json.dumps([_TWICE_ON_STREAMS]),
                "starter_code": "",
                "input_output": json.dumps({"inputs": ["2\n", ["-3"]], "outputs": ["4\n", ["-6"]]}),
                "difficulty": "EASY",
            },
            {
                "question": "Return the largest number.",
                "solutions": json.dumps([_LARGEST]),
                "starter_code": _LARGEST_STARTER,
                "input_output": json.dumps(
                    {"fn_name": "largest", "inputs": [[[1, 3, 2]], [[-1]]], "outputs": [[3], -1]}
                ),
                "difficulty": "EASY",
            },
        ],
        [None, None],
    ),
    "intellect_3": (
        [
            {
                "question": "Print twice the number that is given.",
                "info": json.dumps({"source": "x", "tests": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})}),
            },
            {
                "question": "Write a function largest(xs).",
                "info": json.dumps(
                    {"tests": json.dumps({"fn_name": "largest", "inputs": ["[1, 3, 2]"], "outputs": ["3"]})}
                ),
            },
        ],
        [_TWICE_ON_STREAMS, "def largest(xs):\n    return max(xs)\n"],
    ),
    "verl/code:train": (
        [
            {
                "prompt": [{"role": "user", "content": "Print twice the number that is given."}],
                "ability": "code",
                "reward_model": {"ground_truth": json.dumps({"inputs": ["2"], "outputs": ["4"]})},
            },
        ],
        [_TWICE_ON_STREAMS],
    ),
}

_XLAM_TOOLS = [
    {
        "name": "tide",
        "description": "Time of the next high tide.",
        "parameters": {
            "port": {"description": "a port", "type": "str"},
            "days": {"description": "days from now", "type": "int, optional", "default": 0},
        },
    },
]
_BFCL_TOOL = {
    "name": "ferry.book",
    "description": "Book a ferry.",
    "parameters": {
        "type": "dict",
        "properties": {
            "route": {"type": "string", "description": "from and to"},
            "length": {"type": "float", "description": "of the car in meters"},
            "extras": {"type": "dict", "properties": {"type": {"type": "string", "description": "of cabin"}}},
        },
        "required": ["route"],
    },
}
#: name -> (rows, a wrong answer for each)
FN_CALLING: dict[str, tuple[list[Any], list[str]]] = {
    "xlam_60k": (
        [
            {
                "id": 1,
                "query": "When is high tide in Vik?",
                "tools": json.dumps(_XLAM_TOOLS),
                "answers": json.dumps([{"name": "tide", "arguments": {"port": "Vik"}}]),
            },
        ],
        ['{"name": "tide", "arguments": {"port": "Vik", "days": 1}}'],
    ),
    "bfcl/rows:test": (
        [
            {
                "id": "simple_0",
                "question": [[{"role": "user", "content": "Book the ferry from A to B, with a car of 4 m."}]],
                "function": [_BFCL_TOOL],
                "ground_truth": [{"ferry.book": {"route": ["A-B", "A to B"], "length": [4.0, ""], "extras": [""]}}],
            },
            {
                "id": "parallel_0",
                "question": [[{"role": "user", "content": "Book A to B with a cabin, and B to A."}]],
                "function": [_BFCL_TOOL],
                "ground_truth": [
                    {"ferry.book": {"route": ["A-B"], "length": [""], "extras": [{"type": ["inside", "any"]}]}},
                    {"ferry.book": {"route": ["B-A"], "length": [""], "extras": [""]}},
                ],
            },
        ],
        [
            '{"name": "ferry.book", "arguments": {"route": "A-B", "length": 5}}',
            '{"name": "ferry.book", "arguments": {"route": "A-B", "extras": {"type": "any"}}}',
        ],
    ),
    "chats/with-tools:train": (
        [
            {
                "messages": [
                    {"role": "user", "content": "When is high tide in Vik?"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "tide", "arguments": '{"port": "Vik"}'}}
                        ],
                    },
                ],
                "tools": [{"type": "function", "function": _XLAM_TOOLS[0]}],
            },
        ],
        ["It is at noon."],
    ),
}

_NO_COMMA, _WORDS = "punctuation:no_comma", "length_constraints:number_words"
#: name -> (rows, an answer for each that follows, one that does not)
IFEVAL: dict[str, tuple[list[Any], list[tuple[str, str]]]] = {
    "google_ifeval": (
        [
            {
                "key": 1,
                "prompt": "Write a line about salt without commas, with at least 3 words.",
                "instruction_id_list": [_NO_COMMA, _WORDS],
                "kwargs": [
                    {"num_words": None, "relation": None},
                    {"num_words": 3, "relation": "at least"},
                ],
            },
        ],
        [("Salt is white", "Salt, white salt, is white")],
    ),
    "ifeval_train": (
        [
            {
                "key": "a",
                "messages": [{"role": "user", "content": "Write a line about salt without commas."}],
                "ground_truth": f"[{{'instruction_id': ['{_NO_COMMA}'], 'kwargs': [None]}}]",
                "constraint_type": "multi",
            },
        ],
        [("Salt is white", "Salt, white")],
    ),
}
