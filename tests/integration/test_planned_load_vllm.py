"""Copy plans with vLLM's own layers and loaders: bit by bit what loading tensor by tensor gives, on every worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.random_model import save_random_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TESTS = Path(__file__).parents[1]
#: Half of them in bf16, the other half in fp32: another layout.
UPDATES = 8


@pytest.mark.parametrize(("tied", "ranks", "chunk_bytes"), [(True, 1, 2**28), (False, 1, 10_000), (True, 2, 10_000)])
def test_w1_copied_updates_of_a_real_model_equal_loaded_ones(
    tmp_path: Path, tied: bool, ranks: int, chunk_bytes: int
) -> None:
    folder = save_random_model(tmp_path / "model", tied=tied)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    # The launcher of vLLM's workers sets it; it names their shared memory.
    environ["VLLM_DIST_IDENT"] = f"planned-{os.getpid()}"
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", "fakes.planned_vllm", str(folder), str(rank), str(ranks)]
            command += [str(tmp_path / "meeting"), str(UPDATES), str(chunk_bytes)]
            with (tmp_path / f"{rank}.log").open("w") as log:
                workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environ, text=True))
        outputs = [worker.communicate(timeout=500)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    half = ["record", "prove"] + ["copy"] * (UPDATES // 2 - 2)
    for rank, output in enumerate(outputs):
        assert workers[rank].returncode == 0, (tmp_path / f"{rank}.log").read_text()[-4000:]
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"mode"')]
        assert [line["different"] for line in lines] == [[]] * UPDATES
        assert [line["mode"] for line in lines] == half * 2
