"""The trainer's own path against a real server in fp32: log-probs of sampled tokens, before and after its own steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.random_model import random_ids, random_model
from fakes.static_pool import StaticPool
from fakes.updated_server import connect, sampling, with_client
from fakes.vllm_process import VLLMProcess

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.config.finetune import FinetuneConfig, LoraConfig
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, register_own_attention
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.weight_sync import WeightSync
from pipelinerl.records import IGNORED_LABEL, Sample, TrainingBatch, VersionSpan
from pipelinerl.weights.link import ControlClient
from pipelinerl.weights.sync import WeightPublisher

TEMPERATURE = 0.6
OUTPUT_TOKENS = 40
PROMPTS = [random_ids(length, seed=length) for length in (5, 12, 33, 33, 64, 20)]


@pytest.fixture
def publisher(tiny_server: VLLMProcess) -> Iterator[WeightPublisher]:
    with connect(tiny_server) as publisher:
        yield publisher


def policy_of(seed: int, with_values: bool = False) -> PolicyModel:
    register_own_attention()
    model = random_model(seed=seed)
    model.set_attn_implementation(SEGMENTED_ATTENTION)
    return PolicyModel(model.train(), temperature=TEMPERATURE, chunk_tokens=16, with_values=with_values)


def parts(policy: PolicyModel, publisher: WeightPublisher, **rl: Any) -> tuple[StepRunner, WeightSync]:
    config = FinetuneConfig(seq_length=256, learning_rate=5e-3, num_warmup_steps=0, rl=RLConfig(**rl))
    backend = PlainBackend(policy, config, Ranks())
    runner = StepRunner(backend, config, Ranks())
    return runner, WeightSync(backend, Ranks(), StaticPool(publisher))


def sampled(server: VLLMProcess) -> list[Sample]:
    """What the server answers to all prompts at once, at the sampling temperature, as samples."""

    async def ask(client: ControlClient) -> list[dict[str, Any]]:
        bodies = [sampling(ids, OUTPUT_TOKENS, TEMPERATURE) for ids in PROMPTS]
        return list(await asyncio.gather(*(client.generate(body) for body in bodies)))

    pairs = zip(PROMPTS, with_client(server, ask), strict=True)
    return [sample_of(number, prompt, answer) for number, (prompt, answer) in enumerate(pairs)]


def sample_of(number: int, prompt: list[int], answer: dict[str, Any]) -> Sample:
    (choice,) = answer["choices"]
    output = choice["token_ids"]
    spans = [VersionSpan(int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]]
    return Sample(
        id=f"g/r{number}/s0",
        group_id="g",
        rollout_id=f"g/r{number}",
        input_ids=[*prompt, *output],
        labels=[*[IGNORED_LABEL] * len(prompt), *output],
        logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        reward=float(number % 2),
        advantage=1.0 - number % 3,
        finished=True,
        finish_reason="length",
        prompt_tokens=len(prompt),
        output_tokens=len(output),
        version_spans=spans,
    )


def batch_of(samples: list[Sample], step: int) -> TrainingBatch:
    return TrainingBatch(id=str(step), step=step, samples=samples, group_ids=["g"], plan=[], actor_offset=0)


def test_t3_the_log_ratio_of_an_unchanged_policy_is_0(tiny_server: VLLMProcess, publisher: WeightPublisher) -> None:
    """Packed samples, chunked head, temperature 0.6: mean |log ratio| < 1e-4, so that every weight is 1."""
    runner, feed = parts(policy_of(seed=21), publisher)
    feed.send(0)
    samples = sampled(tiny_server)
    _, diagnostics = runner.accumulate(batch_of(samples, step=1))
    values = diagnostics.values()
    assert values["finetune/logprob_abs_diff_mean"] < 1e-4
    assert values["rl/logprob_abs_diff_max"] < 1e-3
    assert values["finetune/ess"] > 1 - 1e-6
    assert values["rl/lag_share_0"] == 1.0
    # The wrong temperature would show: the test can fail.
    wrong, _ = parts(policy_of(seed=21), publisher)
    wrong._backend.policy.temperature = 1.0
    assert wrong.accumulate(batch_of(samples, step=1))[1].values()["finetune/logprob_abs_diff_mean"] > 0.1


@pytest.mark.parametrize("kind", ["all weights", "lora", "value head"])
def test_w1_servers_have_the_policy_after_every_step(
    tiny_server: VLLMProcess, publisher: WeightPublisher, kind: str
) -> None:
    """Optimizer steps on sampled tokens of a tied model; the probe and the next samples show the trained policy."""
    policy = policy_of(seed=22, with_values=kind == "value head")
    rl = {"advantage_estimator": "gae", "value_loss_coef": 0.5} if kind == "value head" else {}
    if kind == "lora":
        add_adapters(policy, LoraConfig(enabled=True, r=4, alpha=32), "base")
    runner, feed = parts(policy, publisher, **rl)
    feed.send(0)
    for step in (1, 2):
        samples = sampled(tiny_server)
        result = runner.run(batch_of(samples, step))
        assert result.grad_norm > 0
        # All tokens come from the version in training: any difference would be one of weights.
        assert result.metrics["finetune/lag_max_versions"] == 0
        assert result.metrics["finetune/logprob_abs_diff_mean"] < 1e-4
        moved = runner.accumulate(batch_of(samples, step + 1))[1].values()
        policy.zero_grad()
        assert moved["finetune/logprob_abs_diff_mean"] > 1e-3
        probe = feed.send(step, [sample.input_ids for sample in samples]).probe_abs_diff
        assert probe is not None and probe < 1e-4
