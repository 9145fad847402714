"""The program `pipelinerl`: its table of commands, its name in messages, and what shells complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pipelinerl import __main__, dependencies
from pipelinerl.commands import COMMANDS, typed

ROOT = Path(__file__).parents[2]
# What bash hands to the function: the words so far, with the last one to be completed; `=` is a word of its own.
BASH = """
source /dev/stdin
compopt() { printf 'nospace '; }
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
_pipelinerl pipelinerl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[*]}"
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_main(name: str) -> None:
    assert callable(import_module(COMMANDS[name][0]).main)


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("/usr/local/bin/pipelinerl", ("pipelinerl", "pipelinerl samples", "pipelinerl launch")),
        ("/x/pipelinerl/__main__.py", ("python -m pipelinerl", "python -m pipelinerl samples")),
        ("/x/pipelinerl/launch.py", ("python -m pipelinerl",)),
    ],
)
def test_messages_name_what_the_user_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    commands = ("", "samples", "launch")[: len(names)]
    assert tuple(typed(command) for command in commands) == names
    assert __main__.main(["--help"]) == 0
    assert f"usage: {names[0]} COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        __main__.main(["status", "--help"])
    assert f"usage: {names[0]} status" in capsys.readouterr().out


def test_the_installed_program_is_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (name, value), *others = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
    assert name == "pipelinerl" and not others
    program = EntryPoint(name, value, "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pipelinerl", "statsu"])
    assert program() == 2
    assert "Did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["sam"], "samples"),
        (["launch", "finetune.learning_r"], "nospace finetune.learning_rate="),
        (["launch", "worl"], None),
        (["launch", "--config-name", "quick"], "quickstart"),
        (["launch", "output_dir", "=", "res"], ""),
        (["completion", ""], "bash zsh fish"),
        (["status", "res"], ""),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], words: list[str], completed: str | None) -> None:
    assert __main__.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    command = ["bash", "-c", BASH, "bash", "pipelinerl", *words]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    if completed is None:  # a group and the keys below it
        assert {"world=", "world.device="} <= set(done.stdout.split())
    else:
        assert done.stdout.strip() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_valid(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    __main__.main(["completion", shell])
    script = capsys.readouterr().out
    assert "tiny-model" in script and "quickstart" in script and "finetune.learning_rate=" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("has_cuda", "library", "is_unfit"),
    [(False, b"libc10.so\0libc10_cuda.so\0", True), (False, b"libc10.so\0", False), (True, b"libc10_cuda.so\0", False)],
)
def test_a_torchvision_for_cuda_beside_a_torch_for_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_cuda: bool,
    library: bytes,
    is_unfit: bool,
) -> None:
    for package in ("torch", "torchvision"):
        (tmp_path / package / "lib").mkdir(parents=True)
    if has_cuda:
        (tmp_path / "torch/lib/libc10_cuda.so").touch()
    (tmp_path / "torchvision/_C.so").write_bytes(library)
    monkeypatch.setattr(dependencies, "_folder", lambda name: tmp_path / name)
    if not is_unfit:
        dependencies.require_core()
        return
    with pytest.raises(SystemExit) as ended:
        dependencies.require_core()
    assert ended.value.code == 2
    assert f"{sys.executable} -m pip uninstall -y torchvision" in capsys.readouterr().err
