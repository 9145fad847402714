"""`check-domain`: gold answers are graded, a dry rollout is made, and what does not agree is said."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fakes.scripted_texts import chat_tokenizer

from pipelinerl.__main__ import main
from pipelinerl.analysis import check_domain as dry_rollout

# `multi` is made of counting, countdown and math.
OFFLINE = ("guessing", "ifeval", "fn_calling", "logic", "multi")
SMALL = ["dataset_loader_params={num_train: 20, num_test: 5}"]
TASK = """
    from pipelinerl.async_llm import llm_async_generate, make_training_text
    from pipelinerl.grading import grader, verify
    from pipelinerl.llm import Prompt
    from pipelinerl.rollouts import BaseMetrics, RolloutResult

    def load_problems(names):
        return [{"id": name, "answer": "4"} for name in names]

    def gold_answer(problem):
        return GOLD

    def validate(problem):
        return float(grade(gold_answer(problem), problem))

    def check_config(config):
        if config.custom.get("refuse"):
            raise ValueError("refused")

    @grader
    def grade(text, problem):
        return float(text == problem["answer"])

    async def generate_rollout(cfg, llm, problem, session):
        call = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": "2+2?"}]), session)
        found = await verify(grade, call.output.content.strip(None), problem)
        text = make_training_text(llm, call)
        text.reward = found.score
        return RolloutResult([text], BaseMetrics(reward=found.score, success=found.score == 1.0))
"""
SETTINGS = """
    defaults: [base, _self_]
    actor: {rollout_policy: MODULE.generate_rollout}
    dataset_loader: MODULE.load_problems
    train_dataset_names: [a]
    test_dataset_names: [b]
"""


def write_task(folder: Path, module: str, gold: str) -> list[str]:
    code = textwrap.dedent(TASK).replace("GOLD", repr(gold))
    (folder / f"{module}.py").write_text(code)
    (folder / f"{module}.yaml").write_text(textwrap.dedent(SETTINGS).replace("MODULE", module))
    return ["check-domain", module, "--config-dir", str(folder)]


def test_coding_passes_where_its_sandbox_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["+dataset_loader_params.num_train=2", "+dataset_loader_params.num_test=1"]
    code = main(["check-domain", "coding", *few])
    if code == 2 and "sandbox" in capsys.readouterr().err:
        pytest.skip("no sandbox on this machine")
    assert code == 0


@pytest.mark.parametrize("name", OFFLINE)
def test_built_in_domains_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = [] if name in ("guessing", "multi") else SMALL
    assert main(["check-domain", name, *small]) == 0
    out = capsys.readouterr().out
    assert "training problems" in out and "all score 1" in out and "success True" in out


def test_three_rows_are_shown_as_the_model_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = tmp_path / "rows.jsonl", tmp_path / "model"
    file.write_text("".join(f'{{"q": "{n}+1?", "a": "#### {n + 1}"}}\n' for n in range(5)))
    words = [f"train_dataset_names=[{file}]", "test_dataset_names=[]", f"model_path={model}"]
    words.append("+dataset_loader_params.fields={task: q, answer: a}")
    assert main(["check-domain", "math", *words]) == 0
    out = capsys.readouterr().out
    assert [f"user: {n}+1?\n" in out for n in range(4)] == [True, True, True, False]
    chat_tokenizer(32).save_pretrained(model)
    assert main(["check-domain", "math", *words, "actor.system_prompt="]) == 0
    assert "<|user|>2+1?<|end|><|assistant|>" in capsys.readouterr().out
    assert main(["check-domain", "math", *words[:-1]]) == 2
    assert "It has the fields q, a." in capsys.readouterr().err


def test_a_configuration_without_a_task_names_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-domain", "base"]) == 2
    assert "--config-name math|guessing|quickstart" in capsys.readouterr().err


def test_a_task_of_your_own_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(write_task(tmp_path, "own_task_right", "4")) == 0
    assert "gold answers of 2 of 2 problems were graded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gold", "old", "new", "words"),
    [
        ("5", "", "", "the gold answer of problem 'a' scores 0.0"),
        ("4", "strip(None)", "strip('4')", "does not succeed"),
        ("4", "RolloutResult([text],", "RolloutResult([],", "returned no training text"),
        ("4", "    text.reward = found.score\n", "", r"bad_reward.*MODULE.py:24\)"),
        ("4", "call.output.content.strip(None)", "problem['answr']", r"KeyError: 'answr' \(.*MODULE.py:26\)"),
        ("4", "await llm_async", "llm_async", r"AttributeError: .*coroutine.*`await`.*MODULE.py:26\)"),
        ("4", "reward=found.score", "reward='good'", r"reward: .*got 'good' \(.*MODULE.py:29\)"),
        ("4", "text.reward = found.score", "text.reward = 'good'", r"bad_reward.*'good'.*MODULE.py:24\)"),
        ("4", "return '4'", "return problem['gold']", r"validate.*KeyError: 'gold' \(.*MODULE.py:11\)"),
        ("4", "gold_answer(problem), problem", "problem['gold'], problem", r"validate.*'gold' \(.*MODULE.py:14\)"),
        ("4", '"answer": "4"', '"answer": names[1]', r"IndexError: .* \(.*MODULE.py:8\)"),
    ],
)
def test_what_does_not_agree_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gold: str, old: str, new: str, words: str
) -> None:
    module = f"own_task_{abs(hash((gold, old, new)))}"
    command = write_task(tmp_path, module, gold)
    file = tmp_path / f"{module}.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new) if old else file.read_text())
    assert main(command) == 2
    assert re.search(words.replace("MODULE", module), capsys.readouterr().err)


BY_HAND = """
        ids = call.prompt_token_ids + call.output_token_ids
        labels = [-100] * len(call.prompt_token_ids) + call.output_token_ids
        text = TrainingText(text="", input_ids=ids, labels=labels, logprobs=call.logprobs, finished=True)
"""


def test_a_training_text_filled_by_hand_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = write_task(tmp_path, "own_task_by_hand", "4")
    file = tmp_path / "own_task_by_hand.py"
    code = file.read_text().replace(
        "    text = make_training_text(llm, call)\n", textwrap.indent(textwrap.dedent(BY_HAND), "    ")
    )
    file.write_text(code.replace("RolloutResult\n", "RolloutResult, TrainingText\n", 1))
    assert main(command) == 0
    assert "1 sample(s)" in capsys.readouterr().out


def write_waiting_task(folder: Path, module: str, line: str) -> list[str]:
    """A task whose rollout runs `line` before it answers."""
    command = write_task(folder, module, "4")
    file = folder / f"{module}.py"
    call = "    call = await"
    file.write_text(file.read_text().replace(call, f"    {line}\n{call}", 1))
    return command


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import time; time.sleep(600)", "blocks the event loop"),
        ("import re; re.match(r'(a|aa)+$', 'a' * 60 + 'b')", "blocks the event loop"),
        ("import asyncio; await asyncio.sleep(600)", "did not finish within 0.5 s"),
    ],
)
def test_a_rollout_that_does_not_end_is_named_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    if "await" in line:
        # The event loop ends it, however late the machine lets it do so.
        monkeypatch.setattr(dry_rollout, "_BLOCK_GRACE_S", 60.0)
    module = f"own_task_{abs(hash(line))}"
    command = write_waiting_task(tmp_path, module, line)
    assert main([*command, "actor.rollout_timeout_s=0.5"]) == 2
    errors = capsys.readouterr().err
    place = (tmp_path / f"{module}.py").read_text().splitlines().index(f"    {line}") + 1
    assert words in errors and f"{module}.py:{place}" in errors
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ctrl_c_ends_a_check_whose_rollout_blocks(tmp_path: Path) -> None:
    command = write_waiting_task(tmp_path, "own_task_held", "import time; print('held', flush=True); time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-m", "pipelinerl", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line == "held\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
