"""The user's code is imported in a process of its own before anything starts.

Tests that do not look at the process itself take the place of the child: it imports torch and transformers anew.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipelinerl.analysis import check_domain as check_module
from pipelinerl.analysis.check_domain import check_run
from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.errors import EXIT_USER_ERROR, DomainError, UserError
from pipelinerl.run import preflight
from pipelinerl.run.preflight import Start, check_domain
from pipelinerl.world import Cluster, ClusterNode

ASKED = """
    call = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": "?"}]), session)
    text = make_training_text(llm, call)
    text.reward = 0.0
"""
RESULT = "    return RolloutResult([text], BaseMetrics(reward=0.0, success=False))\n"


def check(
    folder: Path,
    body: str,
    rollout: str = ASKED + RESULT,
    test: Sequence[str] = (),
    model_path: str = "no/model",
    **environ: str,
) -> list[str]:
    (folder / "checked_task.py").write_text(
        f"import os, sys\ndef load_problems(names):\n    {body}\n"
        "from pipelinerl.async_llm import llm_async_generate, make_training_text\n"
        "from pipelinerl.llm import Prompt\n"
        "from pipelinerl.rollouts import BaseMetrics, RolloutResult\n"
        f"async def generate_rollout(cfg, llm, problem, session):\n{rollout}"
    )
    run = RunConfig(
        output_dir="x",
        model_path=model_path,
        dataset_loader="checked_task.load_problems",
        train_dataset_names=["a"],
        test_dataset_names=list(test),
        actor={"rollout_policy": "checked_task.generate_rollout"},  # type: ignore[arg-type]
    )
    return check_domain(Start(run, Cluster((ClusterNode("h", (), 1),)), {**os.environ, **environ}, [folder]))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Here the launcher's child runs in the test's own process, with the same file, paths and streams."""

    def run(argv: Sequence[str], env: Mapping[str, str], stderr: Any, **_: Any) -> CompletedProcess[bytes]:
        said = io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(said), redirect_stderr(io.TextIOWrapper(stderr)) as errors:
            patch.setattr(sys, "path", [*env["PYTHONPATH"].split(os.pathsep), *sys.path])
            sys.modules.pop("checked_task", None)
            code = check_module.check_run(Path(argv[-1]))
            errors.flush()
            errors.detach()
        return CompletedProcess(list(argv), code, said.getvalue().encode())

    monkeypatch.setattr(preflight.subprocess, "run", run)
    yield
    sys.modules.pop("checked_task", None)


@pytest.mark.usefixtures("in_this_process")
def test_the_problems_are_counted(tmp_path: Path) -> None:
    body = "print('problems: 1 1'); print('loading 3/3', end=''); return [{'dataset': 'a', 'n': n} for n in range(3)]"
    (line,) = check(tmp_path, body)
    assert line.startswith("3 ") and " 0 test" in line


@pytest.mark.parametrize("line", ["os._exit(0)", "sys.exit(0)"])
def test_a_check_that_the_users_code_ends_is_no_success(tmp_path: Path, line: str) -> None:
    with pytest.raises(DomainError, match=r"sys\.exit\(\)"):
        check(tmp_path, line)


def test_o5_the_users_code_does_not_see_the_secret_of_the_launchers(tmp_path: Path) -> None:
    body = "raise ValueError(f\"seen: {os.environ.get('RAY_AUTH_TOKEN')}\")"
    with pytest.raises(UserError, match="seen: None"):
        check(tmp_path, body, RAY_AUTH_TOKEN="0123456789abcdef")


ONE = "return [{'a': 1}]"


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ("    problem['b']\n" + ASKED + RESULT, r"KeyError: 'b' \(.*checked_task.py:8\)"),
        (ASKED + "    undefined\n" + RESULT, r"NameError.* \(.*checked_task.py:12\)"),
        (ASKED.replace("await ", "") + RESULT, r"`await` missing.* \(.*checked_task.py:10\)"),
        (ASKED, "returned None"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_rollout_function_that_cannot_work_is_refused(tmp_path: Path, rollout: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(tmp_path, ONE, rollout)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (ASKED + "    int(call.output.content)\n" + RESULT, r"ValueError: .* \(.*checked_task.py:12\)"),
        ("    open('/no/such/file')\n", r"FileNotFoundError.* \(.*checked_task.py:8\)"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_failure_that_may_be_due_to_the_answer_is_a_note(tmp_path: Path, rollout: str, words: str) -> None:
    found, note = check(tmp_path, ONE, rollout)
    assert found.startswith("1 ") and note.startswith("note: ") and re.search(words, note)


def test_a_dry_rollout_that_ends_its_process_is_a_note(tmp_path: Path) -> None:
    found, note = check(tmp_path, ONE, ASKED + "    sys.exit('no more')\n")
    assert found.startswith("1 ") and note.startswith("note: ") and "no more" in note


@pytest.mark.usefixtures("in_this_process")
def test_held_out_problems_that_are_trained_on_are_said(tmp_path: Path) -> None:
    body = "return [{'id': f'{names[0]}-{n}', 'dataset': names[0], 'n': n + (names[0] == 'b')} for n in range(4)]"
    found, note = check(tmp_path, body, test=["b"])
    assert found.startswith("4 ") and "3 of the 4 test problems" in note


def save_tokenizer(folder: Path, template: str) -> None:
    vocabulary = {text: number for number, text in enumerate(["<pad>", "<unk>", "?", "a", "b", "c", "<user>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.mark.parametrize(
    ("role", "vocab_size", "words"),
    [
        ("user", 7, None),
        ("system", 7, "roles: system.*no system"),
        ("user", 6, "below 6.*has 6 for"),
        ("tool", 7, "chat template renders a prompt within"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_cannot_read_the_prompt_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, vocab_size: int, words: str | None
) -> None:
    """By its chat template, which may also take too long, or by ids beyond its embedding."""
    if role == "tool":
        monkeypatch.setattr(check_module, "TEMPLATE_LIMIT_S", 0.2)
    save_tokenizer(
        tmp_path / "model",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if m.role == 'tool' %}{% for a in range(999) %}{% for b in range(29999) %}{% endfor %}{% endfor %}"
        "{% endif %}<{{ m.role }}> {{ m.content }} {% endfor %}",
    )
    (tmp_path / "model" / "config.json").write_text(f'{{"vocab_size": {vocab_size}}}')
    rollout = ASKED.replace('"user"', f'"{role}"') + RESULT
    with pytest.raises(UserError, match=f"model_path: (?s:.*){words}") if words else nullcontext():
        check(tmp_path, ONE, rollout, model_path=str(tmp_path / "model"))


def test_a_template_is_tried_where_no_rollout_is_made_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers of its environment are started with the run."""
    (tmp_path / "games_task.py").write_text(
        "def load_problems(names):\n    return [{'a': 1}]\nasync def play(cfg, llm, problem, session):\n    ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = RunConfig.model_validate(
        {
            **{"output_dir": "x", "model_path": str(tmp_path / "model"), "train_dataset_names": ["a"]},
            **{"dataset_loader": "games_task.load_problems", "world": {"env_replicas": 1}},
            "actor": {"rollout_policy": "games_task.play"},
        }
    )
    file = save_config(run, tmp_path / "run.yaml")
    loops = "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"
    for template, limit_s, code in (("{{ 1 / 0 }}", 10.0, 0), (loops, 0.01, EXIT_USER_ERROR)):
        save_tokenizer(tmp_path / "model", template)
        monkeypatch.setattr("pipelinerl.analysis.check_domain.TEMPLATE_LIMIT_S", limit_s)
        assert check_run(file) == code
    assert "model_path" in capsys.readouterr().err
