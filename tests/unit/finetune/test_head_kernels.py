"""The head's Triton kernels, interpreted on the CPU, against fp64; tests/gpu has them compiled."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


def test_log_probs_entropies_and_gradients_are_those_of_fp64():
    pytest.importorskip("triton")
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "fakes.interpreted_head"]
    found = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    # Log-probs, entropies, gradients of hidden states and head, and of a bias where there is one.
    assert [len(errors) for errors in found["errors"]] == [4, 4, 5, 5]
    assert max(max(errors) for errors in found["errors"]) < 1e-5
    log_norms, logprobs, entropies = found["extreme"]
    assert log_norms[:2] == pytest.approx([500, 1 + math.log(2)])
    assert logprobs[:2] == pytest.approx([0, -math.log(2)])
    assert entropies[:2] == pytest.approx([0, math.log(2)])
    assert math.isnan(log_norms[2]) and math.isnan(logprobs[2])
