"""Several runs of one command line: which ones, in which folders, and how the command ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipelinerl.analysis import check_domain
from pipelinerl.config.compose import Member, compose
from pipelinerl.errors import ConfigError
from pipelinerl.launch import launch_members, main
from pipelinerl.run import plan_command

QUICKSTART = ("--config-name", "quickstart")


def folders(*words: str) -> list[str]:
    members = compose([*QUICKSTART, 'output_dir="/runs/a, b\'s"', *words], may_be_several=True).members
    # The command line of each composes to its folder and values.
    for member in members:
        config = compose(member.argv).config
        assert config is not None and Path(config.output_dir) == member.folder
        assert member.folder.parent == Path("/runs/a, b's")
    return [member.folder.name for member in members]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-m", "seed=1,2"], ["seed=1", "seed=2"]),
        (["--multirun", "seed=range(3,5)", "attempts=4"], ["seed=3", "seed=4"]),
        (
            ["+attempts=4,8", "-m", "finetune.learning_rate=1e-5,0.01"],
            [f"attempts={n}_finetune.learning_rate={rate}" for n in (4, 8) for rate in ("1e-05", "0.01")],
        ),
        (["-m", "model_path=a/b,a-b"], ["model_path=a-b", "1-model_path=a-b"]),
        (["-m", f"wandb.wandb_name={'x' * 200},y"], [f"0-wandb.wandb_name={'x' * 81}", "wandb.wandb_name=y"]),
    ],
)
def test_each_combination_has_a_folder(words: list[str], expected: list[str]) -> None:
    assert folders(*words) == expected


def test_a_member_has_its_values() -> None:
    members = compose([*QUICKSTART, "output_dir=x", "-m", "seed=1,2", "attempts=4,8"], may_be_several=True).members
    configs = [compose(member.argv).config for member in members]
    assert [(each.seed, each.attempts) for each in configs if each] == [(1, 4), (1, 8), (2, 4), (2, 8)]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("finetune.learning_rate=interval(0,1)", "finetune.learning_rate"),
        ("output_dir=a,b", "output_dir"),
        ("seed=1,x", "seed"),
        ("seed=1", "--multirun"),
    ],
)
def test_what_cannot_be_several_is_refused(word: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*QUICKSTART, "-m", "output_dir=x", word], may_be_several=True)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["seed=1,2", "wandb.wandb_id=a"], True),
        (["seed=1,2", "wandb.wandb_id=a,b"], True),
        (["wandb.wandb_id=a,b"], False),
        (["seed=1,2", "wandb.wandb_id=a", "wandb.mode=disabled"], False),
    ],
)
def test_no_two_members_are_one_wandb_run(words: list[str], is_refused: bool) -> None:
    with pytest.raises(ConfigError) if is_refused else nullcontext() as caught:
        compose([*QUICKSTART, "-m", "output_dir=x", "wandb.mode=offline", *words], may_be_several=True)
    assert caught is None or caught.value.key == "wandb.wandb_id"


@pytest.mark.parametrize("command", [plan_command.main, check_domain.main])
def test_commands_about_one_run_take_no_several(command: Callable[[list[str]], int]) -> None:
    with pytest.raises(ConfigError) as caught:
        command([*QUICKSTART, "-m", "seed=1,2"])
    assert caught.value.key == "--multirun"


def test_a_member_that_cannot_run_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipelinerl.launch.launch_members", lambda members: pytest.fail("started"))
    assert main([*QUICKSTART, "output_dir=x", "-m", "seed=1,-2"]) == 2
    assert "seed" in capsys.readouterr().err


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The words that launchers were started with; each ends with the code in its last word, or waits for a signal."""
    script, log = tmp_path / "python", tmp_path / "log"
    script.write_text(
        f'#!/bin/sh\necho "$1 $2 $3" >> {log}\n[ "$3" = wait ] || exit "$3"\n'
        "trap 'exit 77' TERM\nwhile :; do sleep 0.01; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return log


def members(*words: str) -> list[Member]:
    return [Member(Path(f"x/{number}"), (word,)) for number, word in enumerate(words)]


@pytest.mark.parametrize(("words", "code"), [(["0", "0"], 0), (["0", "2", "0"], 1)])
def test_a_member_that_fails_costs_the_others_nothing_and_is_named(
    words: list[str], code: int, launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_members(members(*words)) == code
    assert launched.read_text().splitlines() == [f"-m pipelinerl.launch {word}" for word in words]
    said = capsys.readouterr().err.splitlines()[-len(words) :]
    assert [line.rpartition(": ")[2] for line in said] == [
        "completed" if word == "0" else f"exit code {word}" for word in words
    ]


def test_a_signal_ends_the_present_member_and_starts_no_other(
    launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_it() -> None:
        while not launched.exists() or "wait" not in launched.read_text():
            ended.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    ended = threading.Event()
    threading.Thread(target=end_it, daemon=True).start()
    assert launch_members(members("0", "wait", "0")) == 128 + signal.SIGTERM
    assert launched.read_text().splitlines() == ["-m pipelinerl.launch 0", "-m pipelinerl.launch wait"]
    said = capsys.readouterr().err.splitlines()[-3:]
    assert [line.rpartition(": ")[2] for line in said] == ["completed", "exit code 77", "not started"]
