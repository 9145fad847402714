"""The last error of a log: the exception with its place, its cause, never a mere consequence."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.supervise.last_error import LogPart, last_error, user_error

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
    assert last_error(LogPart(write(tmp_path, TRACEBACK))) == "ValueError: bad row 7 (/a/work.py:9)"


def test_the_cause_comes_along(tmp_path: Path) -> None:
    assert last_error(LogPart(write(tmp_path, CHAINED))) == (
        "KeyError: 'x' (/a/io.py:1)\npipelinerl.errors.StreamError: offset 7 of actor (/a/main.py:2)"
    )


def test_the_root_cause_of_a_server(tmp_path: Path) -> None:
    assert last_error(LogPart(write(tmp_path, SERVER))) == "torch.OutOfMemoryError: 3 GiB (/v/core.py:5)"


def test_without_a_traceback_the_last_lines(tmp_path: Path) -> None:
    assert last_error(LogPart(write(tmp_path, "\n".join(f"line {n}" for n in range(9))))) == "\n".join(
        f"line {n}" for n in range(4, 9)
    )


def test_nothing_or_no_file(tmp_path: Path) -> None:
    assert last_error(LogPart(tmp_path / "none.log")) == "it wrote nothing to none.log"
    assert last_error(LogPart(write(tmp_path, ""))) == "it wrote nothing to stderr.log"


def test_an_earlier_process_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path, TRACEBACK + "fine\n")
    assert last_error(LogPart(file, offset=len(TRACEBACK))) == "fine"


def test_user_error_is_the_message_without_its_prefix(tmp_path: Path) -> None:
    file = write(tmp_path, "INFO x\nerror: attempts: got 0\nsecond line\n")
    assert user_error(LogPart(file)) == "attempts: got 0\nsecond line"
    assert user_error(LogPart(write(tmp_path, TRACEBACK))) is None


def test_binary_rubbish_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "stderr.log"
    file.write_bytes(b"\xff\xfe\x00 broken\n")
    assert "broken" in last_error(LogPart(file))


WORKER_KILLED = """(EngineCore pid=5) ERROR 07-01 10:00:00 [x.py:3] Worker proc W-0 died unexpectedly (exit code: -9)
(EngineCore pid=5) ERROR 07-01 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=5) ERROR 07-01 10:00:00 [core.py:1]   File "/v/core.py", line 5, in step
(EngineCore pid=5) ERROR 07-01 10:00:00 [core.py:1] RuntimeError: cancelled
(APIServer pid=4) ERROR 07-01 10:00:00 [api.py:1] Traceback (most recent call last):
(APIServer pid=4) ERROR 07-01 10:00:00 [api.py:1]   File "/v/api.py", line 6, in generate
(APIServer pid=4) ERROR 07-01 10:00:00 [api.py:1] vllm.v1.engine.exceptions.EngineDeadError: See stack trace (above).
(APIServer pid=4) INFO 07-01 10:00:00 [api.py:1] Shutting down
"""
SHUTDOWN_NOISE = """nanobind: leaked 64 types!
 - leaked type "x"
 - ... skipped remainder
/p/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
"""


def test_a_dead_part_of_a_server_is_the_error_and_noise_is_not(tmp_path: Path) -> None:
    stdout, stderr = tmp_path / "stdout.log", write(tmp_path, SHUTDOWN_NOISE)
    stdout.write_text(WORKER_KILLED)
    assert last_error(LogPart(stdout), LogPart(stderr)) == (
        "Worker proc W-0 died unexpectedly (exit code: -9)\nRuntimeError: cancelled (/v/core.py:5)"
    )
    assert last_error(LogPart(tmp_path / "none.log"), LogPart(stderr)) == "it wrote nothing to none.log or stderr.log"


def test_a_consequence_is_better_than_nothing(tmp_path: Path) -> None:
    text = "\n".join(WORKER_KILLED.splitlines()[4:])
    assert last_error(LogPart(write(tmp_path, text))) == (
        "vllm.v1.engine.exceptions.EngineDeadError: See stack trace (above). (/v/api.py:6)"
    )
