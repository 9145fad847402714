"""Peak memory of the chunked head against the plain path, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmark_logprobs.py"


def peak_mib(path):
    command = [sys.executable, str(SCRIPT), "--hidden", "64", "--vocabulary", "8192", "--repeats", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--one", path, "4096"], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])["peak_mib"]


def test_chunks_need_at_most_two_fifths_of_the_memory():
    # Logits of 4096 x 8192 in fp32 are 128 MiB; the plain path holds several copies, a chunk of 1024 rows a quarter.
    chunked, plain = peak_mib("chunked"), peak_mib("plain")
    assert plain > 256
    assert chunked < 0.4 * plain
