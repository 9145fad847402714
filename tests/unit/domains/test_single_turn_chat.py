"""The messages of a task of one question: system words, examples as earlier turns, the template around each."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from pipelinerl.config import RunConfig
from pipelinerl.domains.single_turn import chat


def config(**actor: object) -> DictConfig:
    run = RunConfig(output_dir="unused", model_path="unused", actor=actor)
    return OmegaConf.create(run.model_dump())


def test_a_question_stands_alone_without_examples() -> None:
    assert chat(config(), "1 + 1 =", "Add.") == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1 ="},
    ]
    assert chat(config(system_prompt=""), "1 + 1 =", "Add.") == [{"role": "user", "content": "1 + 1 ="}]


def test_examples_are_earlier_turns_with_the_same_template() -> None:
    examples = [{"task": "2 + 3 =", "answer": "5"}, {"task": "9 - 4 =", "answer": "5"}]
    found = chat(config(examples=examples, task_template="Work out: {task}"), "1 + 1 =", "Add.")
    assert [message["role"] for message in found] == ["system", *["user", "assistant"] * 2, "user"]
    assert [message["content"] for message in found[1:]] == [
        *("Work out: 2 + 3 =", "5", "Work out: 9 - 4 =", "5"),
        "Work out: 1 + 1 =",
    ]
