"""The settings of a server job from the run's configuration and plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.inference.arguments import server_arguments
from pipelinerl.inference.main import settings_of_job
from pipelinerl.world import Job, WorldMap


def context(device: str, port: int | None = 8081, kind: str = "actor_llm", **config: Any) -> Any:
    run = RunConfig(output_dir="/run", model_path="/model", seed=10, **config)
    gpus, rank_gpus = [["1"], ["1" if run.world.placement == "colocated" else "0"]] if device == "cuda" else [[], []]
    job = Job(kind, f"{kind}_1", 1, 0, 0, "127.0.0.1", gpus, port, None, None, 1)
    rank = Job("finetune", "finetune_0", 0, 0, 0, "127.0.0.1", rank_gpus, None, None, None, 1)
    world = WorldMap([job, rank], device, 1, 0, 1, "127.0.0.1", 1)  # type: ignore[arg-type]
    return SimpleNamespace(config=run, job=job, world=world)


def test_a_cpu_server_is_fp32_over_gloo() -> None:
    settings = settings_of_job(context("cpu", vllm_config={"vllm_kwargs": {"max_model_len": 512}}))
    assert (settings.transport, settings.dtype) == ("gloo", "float32")
    assert (settings.model, settings.host, settings.port, settings.seed) == ("/model", "127.0.0.1", 8081, 11)
    assert settings.vllm_kwargs == {"max_model_len": 512}
    assert settings.fp32_head


@pytest.mark.parametrize(("placement", "transport"), [("disaggregated", "nccl"), ("colocated", "ipc")])
def test_a_gpu_server_takes_the_transport_of_its_placement(placement: str, transport: str) -> None:
    settings = settings_of_job(context("cuda", world={"placement": placement}))
    assert (settings.transport, settings.dtype) == (transport, None)
    assert settings.can_sleep == (placement == "colocated")
    assert ("--enable-sleep-mode" in server_arguments(settings)[0]) == settings.can_sleep


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_the_model_is_trusted_by_servers_as_by_the_trainer(trusted: bool) -> None:
    settings = settings_of_job(context("cpu", finetune={"trust_remote_code": trusted}))
    assert ("--trust-remote-code" in server_arguments(settings)[0]) == trusted


def test_a_job_without_port_is_an_error_of_the_plan() -> None:
    with pytest.raises(ValueError, match="actor_llm_1: got no port"):
        settings_of_job(context("cpu", port=None))
