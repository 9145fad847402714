"""The command `samples`: what it prints, its exit codes, and that it leaves the run and the terminal alone."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fakes.recorded_run import RecordedRun

from pipelinerl.__main__ import main
from pipelinerl.records import Group
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = RecordedRun(tmp_path_factory.mktemp("recorded"), test_dataset_names=["held_out"])
    run.write(*run.plain_groups(10))
    return run


def command(run: RecordedRun, *options: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pipelinerl", "samples", str(run.root), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, **kwargs)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def titles(text: str) -> list[str]:
    return [line.split(":")[0] for line in text.splitlines() if line.startswith("rollout ")]


def test_options_choose(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> list[str]:
        assert main(["samples", str(run.root), *options]) == 0
        return titles(capsys.readouterr().out)

    assert shown("--first", "1") == ["rollout 0-0/r0"]
    assert shown("--best", "2") == ["rollout 0-9/r0", "rollout 0-8/r0"]
    assert shown("--worst", "--version", "4") == ["rollout 0-4/r1", "rollout 0-4/r0"]
    assert shown("--group", "0-3") == ["rollout 0-3/r0", "rollout 0-3/r1"]
    assert shown("--group", "0-3", "--best", "1") == ["rollout 0-3/r0"]
    assert shown("--dataset", "train", "--last", "1") == ["rollout 0-9/r1"]
    assert main(["samples", str(run.root), "--max-chars", "4", "--last", "1"]) == 0
    assert "  ~ " in capsys.readouterr().out


def test_json_is_one_object_a_line(run: RecordedRun) -> None:
    result = command(run, "--last", "4", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["sample_id"] for record in records] == [f"0-{n}/r{k}/s0" for n in (8, 9) for k in (0, 1)]
    assert records[-1]["text"] == "<|user|>q9<|end|><|assistant|>9.1<|end|>"
    assert records[-1]["reward"] == -9.0


def test_neither_torch_nor_transformers_is_loaded(run: RecordedRun) -> None:
    code = (
        "import sys; from pipelinerl.__main__ import main; assert main(sys.argv[1:]) == 0; "
        "sys.exit(str(sorted({'torch', 'transformers', 'redis', 'vllm'} & set(sys.modules))))"
    )
    argv = [sys.executable, "-c", code, "samples", str(run.root)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "trian"], "--dataset: got 'trian'"),
        (["--dataset", "held_out"], "--evaluation"),
        (["--dataset", "x\x1b[2J"], r"got 'x\x1b[2J'"),
        (["--version", "77"], "--version: got '77'"),
        (
            ["--version", "3", "--dataset", "train", "--group", "0-4"],
            "--dataset --version --group: got 'train, 3, 0-4'",
        ),
        (["--group", "0-77"], "--group: got '0-77'"),
        (["--step", "1"], "--step: got 1"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_2(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["samples", str(run.root), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1 and "\x1b" not in captured.err


@pytest.mark.parametrize("options", [["--last", "0"], ["--last", "-1"], ["--best", "x"], ["--last", "1", "--best"]])
def test_options_that_make_no_sense_are_refused(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["samples", str(run.root), *options])
    assert caught.value.code == 2 and "error:" in capsys.readouterr().err


def test_a_folder_that_is_no_run_and_a_run_without_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(tmp_path / "nowhere")]) == 2
    assert "expected a started run" in capsys.readouterr().err
    run = RecordedRun(tmp_path)
    assert main(["samples", str(run.root)]) == 2
    error = capsys.readouterr().err
    assert "It ended before" in error and error.count("\n") == 1
    with (run.root / "conf" / "launch.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["samples", str(run.root)]) == 2
    error = capsys.readouterr().err
    assert "Try again later" in error and error.count("\n") == 1
    assert main(["samples", str(tmp_path)]) == 2
    assert f"for instance {run.root}" in capsys.readouterr().err


def test_a_stage_alone_names_the_run_that_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path, debug={"mode": "finetune", "streams_from": "results/first"})
    assert main(["samples", str(run.root)]) == 2
    assert "of results/first" in capsys.readouterr().err


def test_a_damaged_stream_is_named_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path)
    run.write(*run.plain_groups(1))
    (shard,) = (run.root / "streams").rglob("*.jsonl")
    shard.write_bytes(shard.read_bytes() + b"\x1b[2J broken\n")
    assert main(["samples", str(run.root)]) == 1
    error = capsys.readouterr().err
    assert str(shard) in error and "offset 1" in error and "\x1b" not in error and error.count("\n") == 1


def test_a_terminal_has_emphasis_unless_it_is_unwanted(run: RecordedRun) -> None:
    def in_terminal(**environ: str) -> str:
        main_end, their_end = pty.openpty()
        argv = [sys.executable, "-m", "pipelinerl", "samples", str(run.root), "--last", "1"]
        env = {**os.environ, "TERM": "xterm", **environ}
        env.pop("NO_COLOR", None) if "NO_COLOR" not in environ else None
        with subprocess.Popen(argv, stdout=their_end, env=env) as process:
            os.close(their_end)
            text = b""
            while True:
                try:
                    more = os.read(main_end, 65536)
                except OSError:  # how Linux says that the other end is closed
                    break
                if not more:
                    break
                text += more
        os.close(main_end)
        assert process.returncode == 0
        return text.decode()

    assert "\x1b[2m  | <|user|>q9" in in_terminal()
    assert "\x1b" not in in_terminal(NO_COLOR="1")
    assert "\x1b" not in in_terminal(TERM="dumb")


def test_a_reader_that_has_seen_enough_is_no_error(run: RecordedRun) -> None:
    argv = [sys.executable, "-m", "pipelinerl", "samples", str(run.root), "--last", "20"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_an_ended_run_on_its_own_redis_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path, streams={"backend": "redis"})
    with RedisServer(run.root / "redis", run.config.streams) as server:
        run.environ = {REDIS_URL_KEY: server.url}
        run.write(*run.plain_groups(3))
    assert main(["samples", str(run.root), "--last", "1"]) == 0
    assert titles(capsys.readouterr().out) == ["rollout 0-2/r1"]


@pytest.mark.parametrize("backend", ["files", "redis"])
def test_a_running_run_is_read_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    run = RecordedRun(tmp_path, streams={"backend": backend})

    def newest() -> list[str]:
        assert main(["samples", str(run.root), "--last", "1"]) == 0
        return titles(capsys.readouterr().out)

    with ExitStack() as stack:
        if backend == "redis":
            server = stack.enter_context(RedisServer(tmp_path / "redis", run.config.streams))
            run.environ = {REDIS_URL_KEY: server.url}
            monkeypatch.setenv(REDIS_URL_KEY, server.url)
        lock = stack.enter_context((run.root / "conf" / "launch.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = run.streams().writer("actor", "actor_0", Group)
        stack.callback(writer.close)
        for number, group in enumerate(run.plain_groups(3)):
            writer.write(group)
            assert newest() == [f"rollout 0-{number}/r1"]
    if backend == "redis":
        return
    shard = next((run.root / "streams").rglob("*.jsonl"))
    whole = shard.read_bytes()
    for cut in (1, 100, len(whole) // 2):
        shard.write_bytes(whole[:-cut])
        assert newest() in (["rollout 0-1/r1"], ["rollout 0-0/r1"])


def test_a_server_that_only_the_launcher_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path, streams={"backend": "redis"})
    with (run.root / "conf" / "launch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["samples", str(run.root)]) == 2
    assert "Its password is in no file" in capsys.readouterr().err


def test_output_that_is_full_is_one_line(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.write(*run.plain_groups(3))
    argv = [sys.executable, "-m", "pipelinerl", "samples", str(run.root)]
    for options in ([], ["--json", "--last", "9"]):
        with open("/dev/full", "w") as full:
            result = subprocess.run([*argv, *options], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and "No space left on device" in result.stderr


@pytest.mark.parametrize("place", ["streams/actor", "streams/actor/actor_0/0/00000000000000000000.jsonl"])
def test_what_is_no_stream_is_one_line(tmp_path: Path, place: str) -> None:
    run = RecordedRun(tmp_path)
    run.write(*run.plain_groups(1))
    odd = run.root / place
    if odd.is_file():
        odd.unlink()
        odd.mkdir()
    else:
        shutil.rmtree(odd)
        odd.touch()
    result = command(run)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
