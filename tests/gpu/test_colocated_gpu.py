"""One GPU for server and trainer: sleep, weights through CUDA IPC, wake; and a whole colocated run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from fakes.mid_sequence import generate_across_updates
from fakes.random_model import perturb, random_ids, random_model, save_random_model
from fakes.updated_server import connect, generate, probe, sampling
from fakes.visible_gpus import visible_gpu
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import WholeRun, make_whole_run

from pipelinerl.inference.transfer import IN_PLACE_VARIABLE
from pipelinerl.weights.buffers import ModuleSource
from pipelinerl.world import WorldMap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs an NVIDIA GPU"),
]
GIB = 2**30
#: A fixed cache: nothing is measured at the start, so that other processes may use the GPU meanwhile.
CACHE = {"gpu_memory_utilization": 0.1, "kv-cache-memory-bytes": 4 * GIB}


def free_gib() -> float:
    return torch.cuda.mem_get_info(0)[0] / GIB


@pytest.mark.parametrize("in_place", ["0", "1"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_wakes_and_computes_what_the_trainer_does(tmp_path: Path, level: int, in_place: str) -> None:
    folder = save_random_model(tmp_path / "model", tied=True, head_size=64)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(0), IN_PLACE_VARIABLE: in_place}
    settings = {"dtype": "bfloat16", "enable-sleep-mode": "", **CACHE}
    server = VLLMProcess(folder, tmp_path / "server.log", settings, transport="ipc", environ=environ)
    with server:
        # Only now: a server that starts next to a growing process measures wrongly.
        model = random_model(tied=True, seed=5, head_size=64).cuda()
        with connect(server, "ipc", chunk_bytes=10_000) as publisher:
            for version in range(4):
                if version:
                    awake = free_gib()
                    publisher.sleep(level)
                    print(f"level {level}: {free_gib() - awake:.1f} GiB freed")
                    assert free_gib() > awake + 1
                perturb(model, seed=version)
                report = publisher.publish(version, ModuleSource(model, dtype=torch.bfloat16))
                assert report.failed == {}
                print(f"version {version}: {report.seconds}")
                assert probe(publisher, model).mean_abs_diff < 0.1


def test_a_sequence_goes_on_after_an_update_though_no_request_follows(tmp_path: Path) -> None:
    """On GPUs a step is in progress when the call comes, and the engine updates when it has ended."""
    folder = save_random_model(tmp_path / "model", tied=True, head_size=64)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(0)}
    settings = {"dtype": "bfloat16", **CACHE}
    with VLLMProcess(folder, tmp_path / "server.log", settings, transport="ipc", environ=environ) as server:
        model = random_model(tied=True, seed=5, head_size=64).cuda()
        body = sampling(random_ids(12, seed=1), 480)
        with connect(server, "ipc") as publisher:
            publisher.publish(0, ModuleSource(model, dtype=torch.bfloat16))

            def update(attempt: int) -> None:
                perturb(model, seed=attempt)
                report = publisher.publish(1 + attempt, ModuleSource(model, dtype=torch.bfloat16))
                assert report.failed == {}

            answer = generate_across_updates(server, lambda: generate(server, body), update)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 480 and len(choice["weight_versions"]) == 2


def test_a_colocated_run_learns(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    result = run.run(
        "world=single_gpu",
        "world.device=cuda",
        "world.placement=colocated",
        "world.servers_per_gpu=1",
        "schedule=conventional",
        "steps_per_generation=2",
        "world.offload_optimizer=true",
        "max_lag=null",
        "vllm_config.vllm_kwargs.gpu-memory-utilization=0.1",
        "vllm_config.vllm_kwargs.kv-cache-memory-bytes=1073741824",
        "backend=plain",
        timeout_s=800,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.summary["success_after"] > run.summary["success_before"]
    assert run.summary["max_lag_versions"] <= 1
    print_updates(run)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("backend", ["deepspeed_stage3_bf16", "fsdp"])
def test_a_parallel_server_shares_two_gpus_with_two_sharded_ranks(tmp_path: Path, backend: str) -> None:
    """Its second worker copies the buffers of rank 0 over from the other GPU."""
    run = make_whole_run(tmp_path)
    sharded = ["backend=fsdp"] if backend == "fsdp" else ["backend=deepspeed", f"backend.config={backend}"]
    result = run.run(
        "world.device=cuda",
        "world.placement=colocated",
        "world.actor_gpus=[[0,1]]",
        "world.finetune_gpus=[0,1]",
        "schedule=conventional",
        "max_lag=null",
        "vllm_config.vllm_kwargs.tensor-parallel-size=2",
        "vllm_config.vllm_kwargs.gpu-memory-utilization=0.2",
        "vllm_config.vllm_kwargs.kv-cache-memory-bytes=1073741824",
        *sharded,
        timeout_s=800,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.summary["max_lag_versions"] == 0
    print_updates(run)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("ranks", ["[0,1]", "[1,0]"])
def test_a_server_works_beside_a_sharded_rank_on_its_gpu(tmp_path: Path, ranks: str) -> None:
    """No turns: weights come through memory from rank 0, or over NCCL from the other GPU."""
    run = make_whole_run(tmp_path)
    result = run.run(
        "world.device=cuda",
        "world.actor_gpus=[[0]]",
        f"world.finetune_gpus={ranks}",
        "backend=deepspeed",
        "backend.config=deepspeed_stage3_bf16",
        "vllm_config.vllm_kwargs.gpu-memory-utilization=0.2",
        "vllm_config.vllm_kwargs.kv-cache-memory-bytes=1073741824",
        timeout_s=800,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    print_updates(run)


@pytest.mark.parametrize(
    ("gpus", "world", "transports"),
    [
        (1, ["world.device=auto", "world.num_actor_llms=2"], ["ipc", "ipc"]),
        (2, ["world.device=cuda", "world.num_actor_llms=2", "world.servers_per_gpu=2"], ["nccl", "nccl"]),
    ],
)
def test_two_servers_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, world: list[str], transports: list[str]
) -> None:
    """With the trainer, or on another GPU than it. Their caches are computed."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} NVIDIA GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible_gpu(number) for number in range(gpus)))
    run = make_whole_run(tmp_path)
    result = run.run(*world, "backend=plain", timeout_s=800)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    plan = WorldMap.from_json((run.output_dir / "conf" / "world.json").read_bytes())
    servers = plan.jobs_of("actor_llm")
    assert [plan.transport_to(server) for server in servers] == transports
    assert len({tuple(server.gpus) for server in servers}) == 1 and all(server.cache_bytes for server in servers)
    rows = [row for row in run.metric_rows() if "weight_update/num_servers" in row]
    assert {row["weight_update/num_servers"] for row in rows} == {2}
    print_updates(run)


def print_updates(run: WholeRun) -> None:
    rows = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    print(
        [
            {k: v for k, v in row.items() if k.startswith("weight_update/")}
            for row in rows
            if "weight_update/total_s" in row
        ]
    )
