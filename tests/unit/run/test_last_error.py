"""The last error of a log: the exception with its place, its cause, never a mere consequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.run.last_error import LogPart, crash_note, last_error, user_error

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
    """X7: cause first."""
    assert last_error(LogPart(write(tmp_path, CHAINED))) == (
        "KeyError: 'x' (/a/io.py:1)\npipelinerl.errors.StreamError: offset 7 of actor (/a/main.py:2)"
    )


def test_the_root_cause_of_a_server(tmp_path: Path) -> None:
    """X7: not its consequences in other processes."""
    assert last_error(LogPart(write(tmp_path, SERVER))) == "torch.OutOfMemoryError: 3 GiB (/v/core.py:5)"


def test_without_a_traceback_the_last_lines(tmp_path: Path) -> None:
    assert last_error(LogPart(write(tmp_path, "\n".join(f"line {n}" for n in range(9))))) == "\n".join(
        f"line {n}" for n in range(4, 9)
    )


def test_the_usage_above_an_error_of_the_command_line_is_left_out(tmp_path: Path) -> None:
    text = (
        "usage: llm [-h] [--model M]\n           [--seed S]\n           [--dtype D]\nllm: error: unrecognized: --sed\n"
    )
    assert last_error(LogPart(write(tmp_path, text))) == "llm: error: unrecognized: --sed"


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


PYDANTIC = """Traceback (most recent call last):
  File "/v/arg_utils.py", line 7, in create_engine_config
    config = VllmConfig(
             ^^^^^^^^^^^
  File "/v/dataclasses.py", line 5, in __init__
    s.validate(args)
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2). [type=value_error, x]
    For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""
FIELDS = """Traceback (most recent call last):
  File "/a/b.py", line 1, in f
pydantic_core._pydantic_core.ValidationError: 2 validation errors for Settings
attempts
  Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]
    For further information visit https://errors.pydantic.dev/2.13/v/greater_than
inner.a
  Input should be a valid integer [type=int_parsing, input_value='x', input_type=str]
    For further information visit https://errors.pydantic.dev/2.13/v/int_parsing
shutting down
  in order
"""
STATE_DICT = """Traceback (most recent call last):
  File "/a/b.py", line 1, in f
RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "weight".
\tsize mismatch for bias: 3 and 4.
2026-07-01 10:00:00,123 INFO a.b: closing
  in order
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            PYDANTIC,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig: Value error, Total "
            "number of attention heads (9) must be divisible by tensor parallel size (2). (/v/dataclasses.py:5)",
        ),
        (
            FIELDS,
            "pydantic_core._pydantic_core.ValidationError: 2 validation errors for Settings: attempts: Input should be "
            "greater than 0; inner.a: Input should be a valid integer (/a/b.py:1)",
        ),
        (
            STATE_DICT,
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "weight".; '
            "size mismatch for bias: 3 and 4. (/a/b.py:1)",
        ),
        (TRACEBACK, "ValueError: bad row 7 (/a/work.py:9)"),
    ],
)
def test_the_reason_of_a_message_of_several_lines(tmp_path: Path, text: str, expected: str) -> None:
    for prefix in ("", "(APIServer pid=11) ", "(EngineCore pid=3) ERROR 07-01 10:00:00 [core.py:1] "):
        lines = "".join(f"{prefix}{line}\n" for line in text.splitlines())
        assert last_error(LogPart(write(tmp_path, lines))) == expected


def test_a_message_of_many_lines_is_cut(tmp_path: Path) -> None:
    many = [f"  reason {n} {'x' * 90}" for n in range(9)]
    text = "\n".join(["Traceback (most recent call last):", '  File "/a", line 1, in f', "ValueError: several:", *many])
    found = last_error(LogPart(write(tmp_path, text)))
    assert "reason 3" in found and "reason 4" not in found
    assert found.endswith("... (/a:1)") and "\n" not in found


QUIET = """INFO 07-01 10:00:00 [api.py:1] ValueError is handled
(EngineCore pid=5) WARNING 07-01 10:00:00 [x.py:3] Found duplicate keys
(EngineCore pid=5) WARNING 07-01 10:00:00 [x.py:3] Traceback (most recent call last):
(EngineCore pid=5) WARNING 07-01 10:00:00 [x.py:3]   File "/v/x.py", line 5, in step
(EngineCore pid=5) WARNING 07-01 10:00:00 [x.py:3] ImportError: no flash
INFO:     Application startup complete.
2026-07-01 10:00:00,123 INFO pipelinerl.finetune.loop: step 3: loss 0.1
[2026-07-01 10:00:00,123] [WARNING] [engine.py:1] no fused optimizer
[rank1]:[W0701 10:00:00.123 socket.cpp:1] Warning: b
/p/c10d_logger.py:83: FutureWarning: `all_gather` is deprecated.
  return func(*args, **kwargs)
Loading shards:  50%|#####     | 1/2 [00:01<00:01]
"""


def test_information_and_warnings_are_no_errors(tmp_path: Path) -> None:
    assert last_error(LogPart(tmp_path / "none.log"), LogPart(write(tmp_path, QUIET))) == (
        "it wrote no error to none.log or stderr.log"
    )
    assert last_error(LogPart(write(tmp_path, f"{QUIET}2026-07-01 10:00:00,123 ERROR a.b: no room\n{QUIET}"))) == (
        "2026-07-01 10:00:00,123 ERROR a.b: no room"
    )


SEGFAULT = """Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/a/work.py", line 9 in run
  File "/a/main.py", line 3 in <module>
"""


def test_a_signal_leaves_a_note_or_none(tmp_path: Path) -> None:
    part = LogPart(write(tmp_path, TRACEBACK + QUIET))
    assert crash_note(part) is None
    assert crash_note(LogPart(tmp_path / "none.log")) is None
    assert crash_note(LogPart(write(tmp_path, TRACEBACK + SEGFAULT))) == (
        "Fatal Python error: Segmentation fault (/a/work.py:9)"
    )
    aborted = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory\n"
    assert crash_note(LogPart(write(tmp_path, TRACEBACK + aborted))) == (
        "terminate called after throwing an instance of 'c10::Error': what():  CUDA error: out of memory"
    )
    assert crash_note(LogPart(write(tmp_path, WORKER_KILLED))) == "Worker proc W-0 died unexpectedly (exit code: -9)"
