"""The last error of a log: the exception with its place, its cause, never a mere consequence (line X7)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.run.last_error import LogPart, crash_note, last_error, stack_note, user_error

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
(EngineCore pid=12) ERROR 07-01 10:00:00 [core.py:1] torch.OutOfMemoryError: 3 GiB
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11)   File "/v/api.py", line 8, in main
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above.
"""
WORKER_KILLED = """(EngineCore pid=5) ERROR 07-01 10:00:00 [x.py:3] Worker proc W-0 died unexpectedly (exit code: -9)
(EngineCore pid=5) ERROR 07-01 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=5) ERROR 07-01 10:00:00 [core.py:1]   File "/v/core.py", line 5, in step
(EngineCore pid=5) ERROR 07-01 10:00:00 [core.py:1] RuntimeError: cancelled
(APIServer pid=4) ERROR 07-01 10:00:00 [api.py:1] Traceback (most recent call last):
(APIServer pid=4) ERROR 07-01 10:00:00 [api.py:1]   File "/v/api.py", line 6, in generate
(APIServer pid=4) ERROR 07-01 10:00:00 [api.py:1] vllm.v1.engine.exceptions.EngineDeadError: See stack trace (above).
(APIServer pid=4) INFO 07-01 10:00:00 [api.py:1] Shutting down
nanobind: leaked 64 types!
 - leaked type "x"
/p/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
"""
USAGE = "usage: llm [-h] [--model M]\n           [--seed S]\n           [--dtype D]\nllm: error: unrecognized: --sed\n"
PYDANTIC = """Traceback (most recent call last):
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
QUIET = """INFO 07-01 10:00:00 [api.py:1] ValueError is handled
(EngineCore pid=5) WARNING 07-01 10:00:00 [x.py:3] Found duplicate keys
(VllmWorker-0 pid=7) INFO 07-01 10:00:00 [x.py:3] calls [abort_update]
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
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
5it [00:01, 3.20it/s]
"""
OURS = "2026-07-01 10:00:00,123 ERROR a.b: no room"
ERRORS = {
    "exception and place": (TRACEBACK, "ValueError: bad row 7 (/a/work.py:9)"),
    "cause": (CHAINED, "KeyError: 'x' (/a/io.py:1)\npipelinerl.errors.StreamError: offset 7 of actor (/a/main.py:2)"),
    "root cause": (SERVER, "torch.OutOfMemoryError: 3 GiB (/v/core.py:5)"),
    "dead part": (
        WORKER_KILLED,
        "Worker proc W-0 died unexpectedly (exit code: -9)\nRuntimeError: cancelled (/v/core.py:5)",
    ),
    "only a consequence": (
        "\n".join(WORKER_KILLED.splitlines()[4:]),
        "vllm.v1.engine.exceptions.EngineDeadError: See stack trace (above). (/v/api.py:6)",
    ),
    "complaint": ("x.c:3: out of memory\nTriton is disabled.\n", "x.c:3: out of memory"),
    "usage": (USAGE, "llm: error: unrecognized: --sed"),
    "record": (f"{QUIET}{OURS}\n{QUIET}", OURS),
    "pydantic": (
        PYDANTIC,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig: Value error, Total number of "
        "attention heads (9) must be divisible by tensor parallel size (2). (/v/dataclasses.py:5)",
    ),
    "fields": (
        FIELDS,
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for Settings: attempts: Input should be "
        "greater than 0; inner.a: Input should be a valid integer (/a/b.py:1)",
    ),
    "state dict": (
        STATE_DICT,
        'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "weight".; '
        "size mismatch for bias: 3 and 4. (/a/b.py:1)",
    ),
}


def write(tmp_path: Path, text: str) -> LogPart:
    (tmp_path / "stderr.log").write_text(text)
    return LogPart(tmp_path / "stderr.log")


@pytest.mark.parametrize(("text", "expected"), ERRORS.values(), ids=ERRORS)
def test_x7_the_last_error(tmp_path: Path, text: str, expected: str) -> None:
    assert last_error(write(tmp_path, text)) == expected


@pytest.mark.parametrize("prefix", ["(APIServer pid=11) ", "(EngineCore pid=3) ERROR 07-01 10:00:00 [core.py:1] "])
@pytest.mark.parametrize("name", ["exception and place", "pydantic", "fields", "state dict"])
def test_the_prefix_of_a_servers_lines_is_no_part_of_it(tmp_path: Path, name: str, prefix: str) -> None:
    text, expected = ERRORS[name]
    assert last_error(write(tmp_path, "".join(f"{prefix}{line}\n" for line in text.splitlines()))) == expected


@pytest.mark.parametrize("is_late", [False, True])
def test_x7_the_cause_is_in_the_process_that_died_first(tmp_path: Path, is_late: bool) -> None:
    """Of a server's processes: each quotes the one below it, in both logs."""
    gone = (
        "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for "
    )
    gone = f'Traceback (most recent call last):\n  File "/v/executor.py", line 815, in wait\n{gone}root cause.'
    core_log = [f"(EngineCore pid=6) ERROR 11-29 03:41:27 [core.py:1510] {line}" for line in gone.splitlines()]
    worker = "ERROR 11-29 03:41:25 [executor.py:953]"
    worker_log = [f"(Worker pid=7) {worker} {line}" for line in TRACEBACK.splitlines()]
    handled = [f"(APIServer pid=5) {line}" for line in TRACEBACK.replace("row 7", "request").splitlines()]
    if is_late:  # a process writes while another one does
        worker_log[2:2] = core_log[:2]
        core_log = core_log[2:]
    out, err = LogPart(tmp_path / "stdout.log"), write(tmp_path, f"{QUIET}Process EngineCore:\n{gone}\n{SERVER[-160:]}")
    out.file.write_text("\n".join([*worker_log, *core_log]))
    cause = "ValueError: bad row 7 (/a/work.py:9)"
    assert last_error(out, err) == cause
    api = "(APIServer pid=5) Traceback (most recent call last):\n(APIServer pid=5) vllm.EngineDeadError: gone\n"
    out.file.write_text("\n".join([*handled, *worker_log, *core_log, api]))
    assert last_error(out, err).splitlines()[0] == cause, "what a living process handled is no cause"


def test_logs_that_name_no_error(tmp_path: Path) -> None:
    none = LogPart(tmp_path / "none.log")
    found = {last_error(none), last_error(write(tmp_path, "")), last_error(none, write(tmp_path, QUIET))}
    assert len(found) == 3 and all("none.log" in each or "stderr.log" in each for each in found)
    [no_error, *lines] = last_error(write(tmp_path, "".join(f"line {n}\n" for n in range(9)))).splitlines()
    assert "stderr.log" in no_error and lines == [f"line {n}" for n in range(4, 9)]
    (tmp_path / "stderr.log").write_bytes(b"\xff\xfe\x00 broken\n")
    assert "broken" in last_error(LogPart(tmp_path / "stderr.log"))


def test_an_earlier_process_is_skipped(tmp_path: Path) -> None:
    part = write(tmp_path, TRACEBACK + "fine\n")
    assert "bad row" not in last_error(LogPart(part.file, offset=len(TRACEBACK)))


def test_user_error_is_the_message_without_its_prefix(tmp_path: Path) -> None:
    assert (
        user_error(write(tmp_path, "INFO x\nerror: attempts: got 0\nsecond line\n")) == "attempts: got 0\nsecond line"
    )
    assert user_error(write(tmp_path, TRACEBACK)) is None


def test_a_message_of_many_lines_is_cut(tmp_path: Path) -> None:
    many = [f"  reason {n} {'x' * 90}" for n in range(9)]
    text = "\n".join(["Traceback (most recent call last):", '  File "/a", line 1, in f', "ValueError: several:", *many])
    found = last_error(write(tmp_path, text))
    assert "reason 3" in found and "reason 4" not in found and found.endswith("... (/a:1)") and "\n" not in found


def test_a_signal_leaves_a_note_or_none(tmp_path: Path) -> None:
    crashed = "Fatal Python error: Segmentation fault\n\nThread 0x7f (most recent call first):\n"
    crashed += '  File "/a/w.py", line 9 in f\n'
    aborted = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory\n"
    for text, note in (
        (QUIET, None),
        (crashed, "Fatal Python error: Segmentation fault (/a/w.py:9)"),
        (aborted, "terminate called after throwing an instance of 'c10::Error': what():  CUDA error: out of memory"),
        (WORKER_KILLED, "Worker proc W-0 died unexpectedly (exit code: -9)"),
    ):
        assert crash_note(write(tmp_path, TRACEBACK + text)) == note


def test_the_users_own_line_of_a_process_that_was_stuck(tmp_path: Path) -> None:
    """A loader that held the interpreter lock: outer frames say nothing."""
    log = tmp_path / "stderr.log"
    frames = [("/home/me/sums.py", 3, "draw"), ("/home/me/sums.py", 9, "load_problems")]
    frames += [(pipelinerl.__file__, 7, "load"), ("<frozen runpy>", 88, "_run_code")]
    text = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
    beats = f'Thread 0x1 (most recent call first):\n  File "{threading.__file__}", line 331 in wait\n'
    log.write_text(f"Fatal Python error: Aborted\n\n{beats}\nCurrent thread 0x2 (most recent call first):\n{text}")
    first, _, *innermost = stack_note(LogPart(log)).splitlines()
    assert first.endswith("/home/me/sums.py:3 in draw") and "sums.py:9 in load_problems" in innermost[1]
    log.write_text(beats)
    assert stack_note(LogPart(log)).splitlines()[1] == f"{threading.__file__}:331 in wait"
    log.write_text("")
    assert "no stacks" in stack_note(LogPart(log))
