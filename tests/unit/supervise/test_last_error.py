"""The last error of a log: the exception with its place, its cause, never a mere consequence."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.supervise.last_error import last_error, user_error

TRACEBACK = """INFO starting
Traceback (most recent call last):
  File "/a/main.py", line 3, in <module>
    run()
  File "/a/work.py", line 9, in run
    raise ValueError("bad row 7")
ValueError: bad row 7
INFO closing
"""
CHAINED = """Traceback (most recent call last):
  File "/a/io.py", line 1, in read
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/a/main.py", line 2, in main
pipelinerl.errors.StreamError: offset 7 of actor
"""
SERVER = """(EngineCore pid=12) ERROR 07-01 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=12) ERROR 07-01 10:00:00 [core.py:1]   File "/v/core.py", line 5, in step
(EngineCore pid=12) ERROR 07-01 10:00:00 [core.py:1]     x
(EngineCore pid=12) ERROR 07-01 10:00:00 [core.py:1] torch.OutOfMemoryError: 3 GiB
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11)   File "/v/api.py", line 8, in main
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above.
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "stderr.log"
    file.write_text(text)
    return file


def test_exception_and_place(tmp_path: Path) -> None:
    assert last_error(write(tmp_path, TRACEBACK)) == "ValueError: bad row 7 (/a/work.py:9)"


def test_the_cause_comes_along(tmp_path: Path) -> None:
    assert last_error(write(tmp_path, CHAINED)) == (
        "KeyError: 'x' (/a/io.py:1)\npipelinerl.errors.StreamError: offset 7 of actor (/a/main.py:2)"
    )


def test_the_root_cause_of_a_server(tmp_path: Path) -> None:
    assert last_error(write(tmp_path, SERVER)) == "torch.OutOfMemoryError: 3 GiB (/v/core.py:5)"


def test_without_a_traceback_the_last_lines(tmp_path: Path) -> None:
    assert last_error(write(tmp_path, "\n".join(f"line {n}" for n in range(9)))) == "\n".join(
        f"line {n}" for n in range(4, 9)
    )


def test_nothing_or_no_file(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none.log") == "it wrote nothing to none.log"
    assert last_error(write(tmp_path, "")) == "it wrote nothing to stderr.log"


def test_an_earlier_process_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path, TRACEBACK + "fine\n")
    assert last_error(file, offset=len(TRACEBACK)) == "fine"


def test_user_error_is_the_message_without_its_prefix(tmp_path: Path) -> None:
    assert (
        user_error(write(tmp_path, "INFO x\nerror: attempts: got 0\nsecond line\n")) == "attempts: got 0\nsecond line"
    )
    assert user_error(write(tmp_path, TRACEBACK)) is None


def test_binary_rubbish_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "stderr.log"
    file.write_bytes(b"\xff\xfe\x00 broken\n")
    assert "broken" in last_error(file)
