"""D5: a writer of file streams that is killed in the middle of its work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord
from pipelinerl.streams.files import FileReader, FileWriter

WRITE_FOREVER = """
import sys
from pathlib import Path
from pipelinerl.records import MetricRecord
from pipelinerl.streams.files import FileWriter
writer = FileWriter(Path(sys.argv[1]), MetricRecord, 20_000, "never")
print("ready", flush=True)
while True:
    writer.write(MetricRecord(source="s" * 3000, step=writer.next_offset, time=0.0, values={}))
"""


def test_d5_a_killed_writer_loses_nothing_and_frees_the_stream(tmp_path: Path) -> None:
    reader = FileReader[MetricRecord](tmp_path, MetricRecord)
    expected = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with pytest.raises(StreamError, match=f"process {process.pid} is already writing"):
            FileWriter[MetricRecord](tmp_path, MetricRecord, 10**6, "never")
        for _ in range(50):
            for entry in reader.read(60):
                assert entry.offset == entry.record.step == expected
                expected += 1
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    writer = FileWriter[MetricRecord](tmp_path, MetricRecord, 10**6, "never")
    while entries := reader.read(0):
        expected += len(entries)
    assert writer.next_offset == expected
