"""Copy plans with vLLM's own layers and loaders: bit by bit what loading tensor by tensor gives, on every worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.random_model import model_logprobs, perturb, random_ids, random_model, save_random_model
from fakes.vllm_process import VLLMProcess

from pipelinerl.weights.publisher import WeightPublisher
from pipelinerl.weights.report import ServerAddress
from pipelinerl.weights.source import ModuleSource
from pipelinerl.weights.verify import ProbeSequence

pytestmark = pytest.mark.slow
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


def test_w1_a_server_that_copies_computes_what_the_trainer_does_also_after_another_trainer_came(tmp_path: Path) -> None:
    """A whole server on a CPU, made to load in place. A second trainer sends the same layout: the plan stays."""
    folder = save_random_model(tmp_path / "model", tied=True)
    environ = {
        **os.environ,
        "PYTHONPATH": str(TESTS / "fakes" / "in_place_site"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
    }
    settings = {"dtype": "float32", "enable-chunked-prefill": False}
    model = random_model(tied=True, seed=5)
    with VLLMProcess(folder, tmp_path / "server.log", settings, transport="ipc", environ=environ) as server:
        for _trainer in range(2):
            with WeightPublisher(
                server.token, timeout_s=120, chunk_bytes=10_000, transports={"tiny": "ipc"}
            ) as publisher:
                publisher.connect([ServerAddress("tiny", server.url)])
                for version in range(3):
                    perturb(model, seed=version)
                    assert publisher.publish(version, ModuleSource(model)).failed == {}
                    ids = random_ids(60, seed=version)
                    assert publisher.probe([ProbeSequence(ids, model_logprobs(model, ids))]).max_abs_diff < 1e-4
        modes = [line.split()[-1] for line in server.tail(10**9).splitlines() if "loaded in mode" in line]
    assert modes == ["record", "prove", "copy", "copy", "copy", "copy"]
