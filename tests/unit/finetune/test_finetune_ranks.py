"""Two processes over gloo, every backend: gradients as on one rank, weights delivered whole, exact resume."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.backends.tensor_files import read_tensors
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

SCRIPT = Path(__file__).with_name("rank_process.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(backend, folder, world_size=2, limit_s=240):
    port = free_port()
    processes = []
    for rank in range(world_size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        log = (folder / f"log_{rank}.txt").open("w")
        command = [sys.executable, str(SCRIPT), backend, str(folder), "cpu"]
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"log_{rank}.txt").read_text()[-3000:] for rank in range(world_size))
    assert codes == [0] * world_size, logs
    return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(world_size)]


def gradient_on_one_rank(kit):
    policy = kit.policy()
    config = kit.config()
    backend = PlainBackend(policy, config, Ranks())
    StepRunner(backend, config, Ranks(), schedule_of(config)).accumulate(kit.batch(kit.samples(64, 1, masked_every=9)))
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize(
    "backend",
    [
        "plain",
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one(kit, tmp_path, backend):
    results = run_ranks(backend, tmp_path)
    for rank in range(2):
        found = read_tensors(tmp_path / f"gradients_{rank}.safetensors")
        for name, gradient in gradient_on_one_rank(kit).items():
            scale = max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * scale, msg=name)
    first, second = results
    assert first["grad_norms"] == pytest.approx(second["grad_norms"])
    assert first["loss"] == pytest.approx(second["loss"])
    assert first["probe"] < 1e-4 and second["probe"] is None
    # The second rank had two micro-batches; the others are sentinels.
    assert len(first["micro_batches"]) == len(second["micro_batches"]) > 4
    assert [count == 0 for count in second["micro_batches"]] == [False] * 2 + [True] * (len(first["micro_batches"]) - 2)
    # Resuming from the checkpoint repeats step 2.
    assert first["restored_step"] == 1
    assert first["grad_norms"][1] == first["grad_norms"][2]
    whole = read_tensors(tmp_path / "uninterrupted_0.safetensors")
    resumed = read_tensors(tmp_path / "resumed_0.safetensors")
    assert whole.keys() == resumed.keys() and len(whole) > 20
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "current").state_dict()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
        assert torch.equal(tensor, exported[name]), name
