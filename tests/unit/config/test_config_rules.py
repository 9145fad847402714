"""One case for each rule: the configuration that breaks it, and the message."""

from __future__ import annotations

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.rules import RULES
from pipelinerl.errors import ConfigError

KEEP = ["output_dir=x"]
CASES = {
    "group_size": (["attempts=1"], "attempts: got 1, expected at least 2"),
    "reference_servers": (
        ["finetune.rl.reward_minus_kl_coef=0.1", "finetune.rl.reference=servers"],
        "finetune.rl.reference: got 'servers', expected auto or local in a world without servers of the reference",
    ),
    "reference_temperature": (
        ["finetune.rl.reward_minus_kl_coef=0.1", "world.preprocessor_fraction=1", "llm.parameters.temperature=0.7"],
        "llm.parameters.temperature: got 0.7, expected 1.0 with log-probs of reference servers",
    ),
    "value_head": (["finetune.rl.value_loss_coef=0.1"], "finetune.rl.value_loss_coef: got 0.1"),
    "batch_normalisation": (
        ["finetune=ppo", "finetune.rl.normalize_reward=true"],
        "finetune.rl.normalize_reward: got True, expected false with finetune.rl.advantage_estimator=gae",
    ),
    "reward_range": (
        ["finetune.rl.filter_reward_low=1", "finetune.rl.filter_reward_high=0.5"],
        "finetune.rl.filter_reward_low: got 1.0, expected less than finetune.rl.filter_reward_high=0.5",
    ),
    "constant_length": (
        ["finetune.rl.aggregation=constant_length"],
        "Set it to llm.parameters.max_tokens, which is 8192.",
    ),
    "group_options": (
        ["finetune.rl.advantage_estimator=reinforce", "finetune.rl.filter_zero_advantage_groups=true"],
        "finetune.rl.filter_zero_advantage_groups: got True, expected false with finetune.rl.advantage_estimator=rein",
    ),
    "overlong_limit": (
        ["finetune.rl.overlong_buffer_tokens=10"],
        "finetune.rl.overlong_limit_tokens: got None, expected a number of tokens",
    ),
    "entropy_target": (
        ["finetune.rl.target_entropy=0.1", "finetune.rl.final_entropy_bonus=0"],
        "finetune.rl.final_entropy_bonus: got 0.0, expected null with finetune.rl.target_entropy=0.1",
    ),
    "importance_bounds": (["finetune.rl.importance_low=3"], "finetune.rl.importance_low: got 3.0, expected less than"),
    "needs_an_adapter": (
        ["finetune.lora.sync=adapter"],
        "finetune.lora.sync: got 'adapter', expected merged with finetune.lora.enabled=false",
    ),
    "nothing_beside_a_and_b": (
        ["finetune.lora.enabled=true", "finetune.lora.sync=adapter", "finetune.lora.bias=all"],
        "finetune.lora.bias: got 'all', expected none with finetune.lora.sync=adapter",
    ),
    "servers_with_the_same_base": (
        ["finetune.lora.enabled=true", "finetune.lora.sync=adapter", "vllm_config.quantization=fp8"],
        "vllm_config.quantization: got 'fp8', expected no quantization with finetune.lora.sync=adapter",
    ),
    "whole_layers": (
        [
            "finetune.lora.enabled=true",
            "finetune.lora.sync=adapter",
            "+vllm_config.vllm_kwargs.pipeline-parallel-size=2",
        ],
        "vllm_config.vllm_kwargs.pipeline-parallel-size: got 2, expected 1 with finetune.lora.sync=adapter",
    ),
    "one_backend": (["use_fsdp=true"], "use_fsdp: got True, expected false with use_deepspeed=true"),
    "tf32_products": (
        ["finetune.dtype=tf32", "use_deepspeed=false", "use_fsdp=true", "fsdp.param_dtype=bf16"],
        "fsdp.param_dtype: got 'bf16', expected fp32 with finetune.dtype=tf32",
    ),
    "interrupt_step": (
        ["finetune.interrupt_train_steps=2000"],
        "finetune.interrupt_train_steps: got 2000, expected -1 (off), or from 1 to finetune.max_train_steps=1000",
    ),
    "steps_to_save": (["finetune.also_save_steps=[3,0]"], "finetune.also_save_steps: got [0]"),
    "on_policy_updates": (
        ["max_lag=0", "finetune.weight_update_interval=2"],
        "finetune.weight_update_interval: got 2, expected 1 with max_lag=0",
    ),
    "context_number": (
        ["vllm_config.vllm_kwargs.max_model_len=abc"],
        "max_model_len: got 'abc', expected a number of tokens",
    ),
    "context_fits": (
        ["finetune.seq_length=9000"],
        "finetune.seq_length: got 9000, expected at least vllm_config.vllm_kwargs.max_model_len=10000",
    ),
    "prompt_room": (["llm.parameters.max_tokens=10000"], "llm.parameters.max_tokens: got 10000, expected less than"),
    "server_quantisation": (["vllm_config.quantization=bf16_last_layer_fp32"], "fp32_lm_head=true"),
    "cpu_block_size": (
        ["world=cpu", "vllm_config.vllm_kwargs.block_size=16"],
        "vllm_config.vllm_kwargs.block_size: got 16, expected a multiple of 32",
    ),
    "shares": (["world.actor_fraction=0", "world.finetune_fraction=0"], "got 0.0, expected more than 0"),
    "actor_share": (["world.actor_fraction=0"], "world.actor_fraction: got 0.0"),
    "trainer_share": (["world.finetune_fraction=0"], "world.finetune_fraction: got 0.0"),
    "stream_url": (["streams.url=redis://localhost:1/0"], "streams.url: got 'redis://localhost:1/0', expected null"),
    "heartbeat": (["supervise.heartbeat_timeout_s=1"], "supervise.heartbeat_timeout_s: got 1.0, expected more than"),
    "subset": (["train_subset={begin:5,end:5}"], "train_subset: got {'begin': 5, 'end': 5}"),
    "own_streams": (["debug.streams_from=results/y"], "debug.streams_from: got 'results/y', expected null"),
    "known_stages": (["debug.mode=finetune+preprocessor"], "debug.mode: got 'finetune+preprocessor', expected one of"),
    "rollout_function": (
        ["actor.agent_func_path=a.py", "actor.rollout_policy=a.b", "agent.prompt_data=x.jsonl"],
        "actor.rollout_policy: got 'a.b', expected null with actor.agent_func_path=",
    ),
    "agent_prompts": (
        ["--config-name=base", "actor.agent_func_path=a.py"],
        "agent.prompt_data: got None, expected a JSONL file",
    ),
    "shared_devices": (
        ["world.placement=colocated"],
        "schedule: got 'pipeline', expected conventional with world.placement=colocated",
    ),
    "gpu_lists": (["world.actor_gpus=[[0]]"], "world.finetune_gpus: got None, expected a list of GPUs"),
    "generation_steps": (
        ["schedule=concurrent", "steps_per_generation=4"],
        "steps_per_generation: got 4, expected 1 with schedule=concurrent",
    ),
    "round_updates": (
        ["schedule=conventional", "steps_per_generation=8", "finetune.max_version_lag=6"],
        "finetune.max_version_lag: got 6, expected at least steps_per_generation - 1 = 7",
    ),
    "greedy_training": (
        ["llm.parameters.temperature=0"],
        "llm.parameters.temperature: got 0.0, expected more than 0: greedy outputs come from no distribution",
    ),
    "best_needs_evaluations": (
        ["finetune.keep_best=mean_reward", "test_dataset_names=[]"],
        "finetune.keep_best: got 'mean_reward', expected null without held-out problems",
    ),
    "value_loss": (
        ["finetune.model_class=causal-language-modeling-with-value-head", "finetune.rl.value_loss_coef=0.5"],
        "finetune.rl.value_loss_coef: got 0.5, expected 0 with finetune.rl.advantage_estimator=rloo",
    ),
}
# The composition already makes these agree.


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["world.finetune_gpus=[1]"], "world.actor_gpus: got None, expected a list of GPUs, as in world.finetune_gpus"),
        (
            ["world.actor_gpus=[[0]]", "world.finetune_gpus=[1]", "world.preprocessor_fraction=1"],
            "world.preprocessor_gpus: got None",
        ),
        (["world.actor_gpus=[[0]]", "world.finetune_gpus=[1,1]"], "got [1, 1], expected each GPU once"),
        (["world.actor_gpus=[[0,0]]", "world.finetune_gpus=[1]"], "got [[0, 0]], expected each GPU once"),
        (["world.actor_gpus=[[]]", "world.finetune_gpus=[1]"], "got [[]], expected each GPU once"),
    ],
)
def test_lists_of_gpus_are_whole(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*KEEP, *overrides])
    assert expected in str(caught.value)


def test_an_empty_list_of_gpus_is_not_a_wrong_count() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*KEEP, "world.actor_gpus=[]", "world.finetune_gpus=[1]"])
    assert "world.actor_gpus: got []" in str(caught.value) and "num_actor_llms" not in str(caught.value)


def test_lists_of_gpus_say_the_counts() -> None:
    lists = ["world.actor_gpus=[[0],[0]]", "world.preprocessor_gpus=[[1]]", "world.finetune_gpus=[1,0]"]
    config = compose([*KEEP, "world=cpu", *lists]).config
    assert config is not None
    world = config.world
    assert (world.num_actor_llms, world.num_preprocessor_llms, world.num_finetune_ranks) == (2, 1, 2)


@pytest.mark.parametrize("name", CASES)
def test_the_rule_refuses(name: str) -> None:
    overrides, expected = CASES[name]
    with pytest.raises(ConfigError) as caught:
        compose([*KEEP, *overrides])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["attempts=1", "finetune.rl.advantage_estimator=reinforce"],
        ["attempts=1", "finetune.rl.advantage_estimator=reinforce", "finetune.rl.normalize_reward=true"],
        ["finetune.rl.filter_reward_low=0", "finetune.rl.filter_reward_high=1"],
        ["finetune.rl.kl_coef=0.1", "llm.parameters.temperature=0.7"],
        # KL in the reward, beside the trainer: at any temperature, also where devices are shared.
        ["finetune.rl.reward_minus_kl_coef=0.1", "llm.parameters.temperature=0.7"],
        ["finetune.rl.reward_minus_kl_coef=0.1", "world.preprocessor_fraction=1", "finetune.rl.reference=local"],
        [
            "finetune.rl.reward_minus_kl_coef=0.1",
            "world.placement=colocated",
            "schedule=conventional",
            "use_deepspeed=false",
        ],
        [
            "finetune.rl.kl_coef=0.1",
            "world.preprocessor_fraction=1",
            "finetune.rl.reference=local",
            "llm.parameters.temperature=0.7",
        ],
        ["finetune.rl.kl_coef=0.1"],
        ["finetune.rl.kl_coef=0.1", "world.preprocessor_fraction=1"],
        ["finetune.rl.final_kl_coef=0.1", "world.num_preprocessor_llms=1"],
        ["finetune=ppo"],
        ["finetune.rl.divide_advantage_by_std=true"],
        ["finetune.rl.overlong_buffer_tokens=10", "finetune.rl.overlong_limit_tokens=10"],
        ["finetune.rl.aggregation=constant_length", "finetune.rl.constant_length_tokens=100"],
        ["finetune.seq_packing=false", "world.num_finetune_ranks=4", "finetune.gradient_accumulation_passes=1023"],
        ["use_fsdp=true", "use_deepspeed=false"],
        ["finetune.lora.enabled=true", "use_deepspeed=true"],
        ["finetune.lora.enabled=true", "use_deepspeed=false", "use_fsdp=true"],
        ["finetune.lora.enabled=true", "finetune.lora.sync=adapter", "finetune.lora.r=512"],
        ["finetune.lora.enabled=true", "finetune.lora.bias=all", "finetune.lora.r=513"],
        ["finetune.lora.enabled=true", "world=single_gpu", "schedule=conventional", "use_deepspeed=false"],
        ["finetune.interrupt_train_steps=1000"],
        ["finetune.seq_length=10000"],
        ["~vllm_config.vllm_kwargs.max_model_len", "finetune.seq_length=128"],
        ["test_llm.parameters.top_p=0.9", "test_llm.parameters.top_k=50"],
        ["llm.parameters.temperature=0.6"],
        ["test_llm.parameters.temperature=0"],
        ["world.actor_fraction=0", "world.num_actor_llms=1"],
        ["world.finetune_fraction=0", "debug.mode=actor"],
        ["debug.mode=open_loop"],
        ["debug.mode=finetune", "debug.streams_from=results/y", "world.actor_fraction=0"],
        ["debug.mode=preprocessor", "debug.streams_from=results/y"],
        ["streams=redis", "streams.url=redis://localhost:1/0"],
        ["train_subset={begin:0,end:5}"],
        ["schedule=concurrent", "finetune.weight_update_interval=2"],
        ["world=single_gpu", "schedule=conventional", "use_deepspeed=false", "world.offload_optimizer=true"],
        ["schedule=conventional", "steps_per_generation=8", "finetune.max_version_lag=7"],
    ],
    ids=" ".join,
)
def test_the_neighbour_of_a_mistake_is_accepted(overrides: list[str]) -> None:
    assert compose([*KEEP, *overrides]).config is not None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["attempts=1", "finetune.rl.advantage_estimator=reinforce_baseline"],
            "attempts: got 1, expected at least 2 with finetune.rl.advantage_estimator=reinforce_baseline",
        ),
        (
            ["finetune=ppo", "finetune.rl.value_loss_coef=0"],
            "finetune.rl.value_loss_coef: got 0.0, expected more than 0 with finetune.rl.advantage_estimator=gae",
        ),
        (["finetune=ppo", "finetune.rl.value_loss_coef=0"], "Start from finetune=ppo"),
        (
            ["finetune.rl.advantage_estimator=reinforce_baseline", "finetune.rl.use_advantages=false"],
            "finetune.rl.use_advantages: got False, expected true with finetune.rl.normalize_reward=true",
        ),
        (
            ["attempts=1", "finetune.rl.advantage_estimator=reinforce", "finetune.rl.filter_reward_low=0"],
            "attempts: got 1, expected at least 2 with finetune.rl.filter_reward_low",
        ),
        (
            ["finetune.rl.kl_coef=0.1", "world.preprocessor_fraction=1", "llm.parameters.temperature=0.7"],
            "Set it to 1.0, or finetune.rl.reference=local.",
        ),
    ],
)
def test_settings_of_the_algorithm_that_would_train_something_else(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*KEEP, *overrides])
    assert expected in str(caught.value)


def test_k1_as_a_loss_gets_a_note() -> None:
    notes = compose([*KEEP, "finetune.rl.kl_coef=0.1", "finetune.rl.kl_estimator=k1"]).notes
    assert [note for note in notes if note.startswith("finetune.rl.kl_estimator=k1")]
    assert compose([*KEEP, "finetune.rl.kl_estimator=k1"]).notes == []


@pytest.mark.parametrize(
    ("preset", "aggregation"), [("base", "sample"), ("grpo", "sample_mean"), ("gspo", "sample_mean"), ("ppo", "sample")]
)
def test_the_divisor_of_a_preset_is_that_of_its_paper(preset: str, aggregation: str) -> None:
    config = compose([*KEEP, f"finetune={preset}"]).config
    assert config is not None and config.finetune.rl.aggregation == aggregation


@pytest.mark.parametrize(
    "overrides",
    [
        ["finetune.rl.final_kl_coef=0.1", "finetune.rl.reference=servers"],
        [
            "finetune.rl.kl_coef=0.1",
            "finetune.rl.reference=servers",
            "world.preprocessor_fraction=1",
            "world.num_preprocessor_llms=0",
        ],
    ],
    ids=" ".join,
)
def test_m4_a_kl_term_that_needs_servers_is_refused_without_them(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="servers of the reference model"):
        compose([*KEEP, *overrides])


@pytest.mark.parametrize("override", ["llm.parameters.top_p=0.99", "llm.parameters.top_k=1000"])
def test_t4_sampling_from_a_cut_distribution_is_refused_in_training_with_the_reason(override: str) -> None:
    with pytest.raises(ConfigError, match="would bias the policy"):
        compose([*KEEP, override])
    assert compose([*KEEP, f"test_{override}"]).config is not None


@pytest.mark.parametrize("key", ["max_lag", "finetune.max_version_lag"])
def test_a_lag_is_not_negative(key: str) -> None:
    with pytest.raises(ConfigError, match="expected at least 0"):
        compose([*KEEP, f"{key}=-1"])


def test_several_broken_rules_are_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*KEEP, "attempts=1", "use_fsdp=true", "llm.parameters.temperature=0"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "attempts",
        "use_fsdp",
        "llm.parameters.temperature",
    ]


def test_the_best_model_may_be_kept_where_something_is_evaluated() -> None:
    assert compose([*KEEP, "finetune.keep_best=mean_reward"]).config.finetune.keep_best == "mean_reward"


def test_a_long_warm_up_is_a_remark() -> None:
    notes = compose([*KEEP, "finetune.max_train_steps=3"]).notes
    assert any("finetune.num_warmup_steps=50" in note for note in notes)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["world.offload_optimizer=true"], "expected false with world.placement=disaggregated"),
        (["world=single_gpu", "schedule=conventional", "world.offload_optimizer=true"], "use_deepspeed or use_fsdp"),
        (["world=single_gpu", "schedule=conventional", "world.preprocessor_fraction=1"], "beside the trainer"),
        (["schedule=conventional", "finetune.weight_update_interval=4"], "Use steps_per_generation=4 instead"),
    ],
)
def test_what_shared_devices_and_rounds_exclude(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        compose([*KEEP, *overrides])


def test_a_bound_on_the_lag_that_is_not_used_is_remarked() -> None:
    notes = compose([*KEEP, "schedule=conventional", "steps_per_generation=4", "max_lag=64"]).notes
    assert any("max_lag=64 is not used" in note and "= 3 versions" in note for note in notes)
