"""Prompts of an agent function from files: columns, templates, limits, shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_texts import chat_tokenizer

from pipelinerl.actor.problem_order import ProblemOrder
from pipelinerl.config.compose import compose
from pipelinerl.domains.prompt_data import load_prompts
from pipelinerl.domains.user_task import load_problem_sets
from pipelinerl.errors import DomainError


def rows(folder: Path, *entries: Any) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return str(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer(32).save_pretrained(folder)
    return str(folder)


def test_prompts(model: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "7"}]
    name = rows(tmp_path, {"q": messages, "a": "1"}, "", {"q": "8" * 50, "a": 2}, {"q": "9", "a": None}, {"q": "10"})
    problems = load_prompts(
        [name], model_path=model, input_key="q", label_key="a", apply_chat_template=True, prompt_max_len=20,
        max_samples=3,
    )  # fmt: skip
    assert [(problem["id"], problem["state"], problem["label"]) for problem in problems] == [
        ("prompts-0", "<|system|>be<|end|><|user|>7<|end|><|assistant|>", "1"),
        ("prompts-2", "<|user|>9<|end|><|assistant|>", None),
    ]
    # X4: only a line feed ends a row, as in every file of rows (`read_jsonl`).
    (split,) = load_prompts([rows(tmp_path, '{"input": "one\u2028two"}')], model_path=model)
    assert split["state"] == "one\u2028two"
    Path(rows(tmp_path)).write_text('{"input": "a"}\r\n{"input": "b"}', encoding="utf-8-sig")
    assert [each["state"] for each in load_prompts([str(tmp_path / "prompts.jsonl")], model_path=model)] == ["a", "b"]
    (plain,) = load_prompts([rows(tmp_path, {"input": "as it is"})], model_path=model)
    assert (plain["state"], plain["label"], plain["dataset"]) == ("as it is", "", str(tmp_path / "prompts.jsonl"))


def test_a_system_prompt_and_arguments_of_the_template(model: str, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "8"}]
    name = rows(tmp_path, {"input": "7"}, {"input": own})
    problems = load_prompts(
        [name], model_path=model, apply_chat_template=True, system_prompt="be",
        chat_template_kwargs={"chat_template": "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"},
    )  # fmt: skip
    assert [each["state"] for each in problems] == ["[system be][user 7]", "[system own][user 8]"]


def test_several_data_sets_follow_one_another(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of 2, 1 and 2 rows of the same name: rows 1 to 4 are taken, and every id is there once."""
    names = []
    for folder, numbers in (("a", (1, 2)), ("b", (3,)), ("c", (4, 5))):
        (tmp_path / folder).mkdir()
        names.append(rows(tmp_path / folder, *({"input": str(number)} for number in numbers)))
    problems = load_prompts([*names, names[0]], model_path=model, max_samples=4)
    assert [(problem["id"], problem["state"], problem["dataset"]) for problem in problems] == [
        ("prompts-0", "1", names[0]),
        ("prompts-1", "2", names[0]),
        ("prompts.2-0", "3", names[1]),
        ("prompts.3-0", "4", names[2]),
    ]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [names[0]]
    twice = load_prompts([names[0], names[0]], model_path=model)
    assert [problem["id"] for problem in twice] == ["prompts-0", "prompts-1", "prompts.2-0", "prompts.2-1"]


def test_data_sets_are_drawn_by_their_shares(model: str, tmp_path: Path) -> None:
    """2 and 30 rows, drawn 3 to 1: of any 4 prompts 3 are of the small file, which begins anew when it is used up."""
    names = []
    for folder, count in (("small", 2), ("large", 30)):
        (tmp_path / folder).mkdir()
        names.append(rows(tmp_path / folder, *({"input": f"{folder}{number}"} for number in range(count))))
    words = [f"agent.prompt_data='{names[0]},{names[1]}'", "agent.prompt_data_probs=0.75,0.25"]
    (tmp_path / "f.py").touch()
    words += ["--config-name=agent", "output_dir=x", f"model_path={model}", f"actor.agent_func_path={tmp_path}/f.py"]
    config = compose(words).config
    assert config is not None
    problems = load_problem_sets(config).train
    assert len(problems) == 32
    order = ProblemOrder(problems, "0")
    drawn = [order[number].data["state"] for number in range(40)]
    assert [sum(state.startswith("small") for state in drawn[at : at + 4]) for at in range(0, 40, 4)] == [3] * 10
    small = [state for state in drawn if state.startswith("small")]
    assert all({*small[at : at + 2]} == {"small0", "small1"} for at in range(0, 30, 2))
    assert len({state for state in drawn if state.startswith("large")}) == 10
    # Of 8 rows in all 6 would be of the small file.
    few = load_prompts(names, model_path=model, max_samples=8, shares=config.dataset_loader_params["shares"])
    assert [problem["dataset"] for problem in few] == [names[0]] * 2 + [names[1]] * 2
    # Held-out data has no shares.
    assert "share" not in load_prompts(names[:1], model_path=model, shares=config.dataset_loader_params["shares"])[0]


@pytest.mark.parametrize(
    ("entries", "params", "place"),
    [
        (({"input": "x"}, "{broken"), {}, "agent.prompt_data: .*prompts.jsonl:2:"),
        (("[1, 2]",), {}, "agent.prompt_data: .*prompts.jsonl"),
        (({"x": "y"},), {}, "agent.input_key: .* row 0 "),
        (({"input": "y"},), {"label_key": "z"}, "agent.label_key: .* row 0 "),
        (({"input": []},), {}, "agent.prompt_data: .* row 0.*agent.apply_chat_template=true"),
        (({"input": []},), {"apply_chat_template": True}, "agent.prompt_data: .* row 0"),
    ],
)
def test_prompts_that_cannot_be_used(
    entries: Any, params: dict[str, Any], place: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(DomainError, match=place):
        load_prompts([rows(tmp_path, *entries)], model_path=model, **params)
