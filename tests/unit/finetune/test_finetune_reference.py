"""The reference model beside the trainer: KL is 0 at the start and moves with the policy (M4)."""

import json

import pytest
import torch

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.model import ReferenceModel, load_policy, load_reference
from pipelinerl.finetune.policy import logprobs_from_logits
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

CPU = torch.device("cpu")


@pytest.fixture
def load(kit, tmp_path):
    folder = tmp_path / "model"
    kit.model().save_pretrained(folder)

    def make(has_servers=False, temperature=1.0, **finetune):
        rl = {"kl_coef": 0.1, **finetune.pop("rl", {})}
        settings = kit.config(gradient_checkpointing=False, rl=rl, **finetune)
        config = RunConfig(
            output_dir=str(tmp_path),
            model_path=str(folder),
            finetune=json.loads(settings.model_dump_json()),
            llm={"parameters": {"temperature": temperature}},
        )
        torch.manual_seed(5)
        policy = load_policy(config, CPU)
        return config, policy, load_reference(config, policy, CPU, has_servers)

    return make


def runner(config, policy, reference):
    backend = PlainBackend(policy, config.finetune, Ranks())
    return StepRunner(backend, config.finetune, Ranks(), reference=reference)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_m4_kl_is_0_at_the_start_and_moves_with_the_policy(kit, load, lora, temperature):
    config, policy, reference = load(temperature=temperature, lora={"enabled": lora}, learning_rate=1e-3)
    steps = runner(config, policy, reference)
    found = [steps.run(kit.batch(kit.samples(8, seed=1), step=step)).metrics["rl/kl_reference"] for step in (1, 2, 3)]
    assert found[0] == 0.0
    assert 1e-6 < found[1] < found[2]


def test_m4_kl_is_exactly_0_at_the_start_with_products_in_bf16_too(kit, load):
    config, policy, reference = load(dtype="bf16")
    model = reference._model.language_model.model
    assert model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16 and model.norm.weight.dtype == torch.float32
    assert runner(config, policy, reference).run(kit.batch(kit.samples(8))).metrics["rl/kl_reference"] == 0.0


@pytest.mark.parametrize("lora", [False, True])
def test_log_probs_are_those_of_the_initial_model_at_the_sampling_temperature(kit, load, lora):
    config, policy, reference = load(temperature=0.6, lora={"enabled": lora})
    steps = runner(config, policy, reference)
    samples = kit.samples(3)
    for step in (1, 2):
        steps.run(kit.batch(samples, step=step))
    batch = kit.batch(samples, step=3, plan=[[[0], [1], [2]]])
    for sample, micro_batch in zip(samples, steps.micro_batches(batch), strict=True):
        ids = torch.tensor([sample.input_ids])
        with torch.no_grad():
            logits = kit.model()(input_ids=ids, use_cache=False).logits
        expected = logprobs_from_logits(logits[0, :-1], ids[0, 1:], 0.6, False)[0]
        mask = micro_batch.mask[0, : len(expected)]
        ours = micro_batch.ref_logprobs[0, : len(expected)]
        torch.testing.assert_close(ours[mask], expected[mask], atol=1e-5, rtol=0)
        assert not micro_batch.ref_logprobs.requires_grad


def test_m4_the_kl_term_pulls_the_policy_back(kit, load):
    distances = []
    for coefficient in (1e-9, 5.0):
        config, policy, reference = load(rl={"kl_coef": coefficient}, gradient_clipping_threshold=None)
        steps = runner(config, policy, reference)
        for step in (1, 2, 3, 4):
            result = steps.run(kit.batch(kit.samples(16, seed=1), step=step))
        distances.append(result.metrics["rl/kl_reference"])
    assert distances[1] < 0.8 * distances[0]


def test_adapters_cost_no_second_copy_and_trained_biases_do(load):
    _, policy, reference = load(lora={"enabled": True})
    assert reference._model is policy
    _, policy, reference = load(lora={"enabled": True, "bias": "lora_only"})
    assert reference._model is not policy


def test_who_scores(load):
    assert load(has_servers=True)[2] is None
    assert load(has_servers=True, rl={"reference": "local"})[2] is not None
    assert load(rl={"reference": "servers"})[2] is None
    assert load(rl={"kl_coef": 0.0})[2] is None
    assert load(rl={"kl_coef": 0.0, "final_kl_coef": 0.1})[2] is not None
    assert load(rl={"kl_coef": 0.0, "reward_minus_kl_coef": 0.1})[2] is not None
    assert load(has_servers=True, rl={"kl_coef": 0.0, "reward_minus_kl_coef": 0.1})[2] is None


def test_adapters_are_on_again_behind_an_error(kit):
    policy = kit.policy()
    add_adapters(policy, LoraConfig(enabled=True), "base")
    with pytest.raises(AttributeError):
        ReferenceModel(policy, CPU).logprobs([None])
    assert not any(getattr(m, "_disable_adapters", False) for m in policy.modules())
