"""The actor against the real server, whose weights change in the middle of its sequences."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.mid_sequence import num_running
from fakes.random_model import model_logprobs, perturb, random_model
from fakes.updated_server import connect
from fakes.vllm_process import VLLMProcess

from pipelinerl.records import Sample
from pipelinerl.weights.buffers import ModuleSource


def crossing_samples(run: ActorRun) -> list[Sample]:
    return [sample for group in run.groups for sample in group.samples if len(sample.version_spans) > 1]


def wait_for_crossing_samples(run: ActorRun) -> None:
    deadline = time.monotonic() + 120
    while not crossing_samples(run):
        assert time.monotonic() < deadline, "no sequence crossed an update"


def wait_for_running_requests(server: VLLMProcess) -> None:
    """An update crosses sequences only if some are running."""
    deadline = time.monotonic() + 60
    while num_running(server) == 0:
        assert time.monotonic() < deadline, "no request is running"


def test_samples_agree_with_the_trainer_and_cross_updates(tmp_path: Path, tiny_server: VLLMProcess) -> None:
    torch.set_num_threads(1)
    model = random_model(seed=21)
    at_version_0 = random_model(seed=21)
    run = ActorRun(
        tmp_path,
        tiny_server.model,
        [tiny_server.url],
        tiny_server.token,
        max_lag=None,
        actor={"test_samples": 8},
        llm={"parameters": {"max_tokens": 150, "temperature": 0.7, "ignore_eos": True}},
    )
    with connect(tiny_server) as publisher:

        def publish(version: int) -> None:
            if version == 4:
                # Sequences that crossed an update are seen when their groups are written, so wait with the last update.
                wait_for_crossing_samples(run)
            if version:
                wait_for_running_requests(tiny_server)
                perturb(model, seed=version)
            assert publisher.publish(version, ModuleSource(model)).failed == {}

        # Without a bound on the lag the actor never waits, so sequences are running at every update.
        with run.started(), CountingTrainer(run, steps=4, on_version=publish, step_s=0.15):
            assert run.wait(200) == 0, run.stderr
    samples = [sample for group in run.groups for sample in group.samples]
    assert crossing_samples(run)
    first = next(sample for sample in samples if sample.max_version == 0)
    expected = model_logprobs(at_version_0, first.input_ids, temperature=0.7)[first.prompt_tokens - 1 :]
    assert max(abs(a - b) for a, b in zip(first.logprobs, expected, strict=True)) < 1e-4
    assert first.output_tokens == 150 and not first.finished
    before, after = run.evaluations
    assert (before.due_version, after.due_version, after.is_final) == (0, 4, True)
    assert before.num_rollouts == after.num_rollouts == 8
