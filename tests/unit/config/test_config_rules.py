"""Rules between sections: what is refused and under which key, what is accepted, and remarks."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.config.advice import advice
from pipelinerl.config.compose import compose, compose_plain
from pipelinerl.config.faults import ConfigFaults
from pipelinerl.config.load import read_deepspeed_file, to_run_config
from pipelinerl.config.resources import VLLMConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.config.validate import validate
from pipelinerl.errors import ConfigError

GAE = "finetune.rl.advantage_estimator=gae"
ADAPTER = "finetune.lora.enabled=true finetune.lora.sync=adapter"
COLOCATED = "world.placement=colocated schedule=conventional backend=plain"
KWARGS = "vllm_config.vllm_kwargs"


@cache
def base() -> dict[str, Any]:
    return compose_plain("math").data


def checked(words: str) -> RunConfig:
    """The default experiment with `KEY=VALUE` words, checked."""
    data = copy.deepcopy(base()) | {"output_dir": "x"}
    for word in words.split():
        key, _, value = word.partition("=")
        section: Any = data
        *heads, leaf = key.split(".")
        for head in heads:
            section[head] = section.get(head) or {}
            section = section[head]
        section[leaf] = yaml.safe_load(value) if value else ""
    config = to_run_config(data)
    validate(config)
    return config


def faults(words: str) -> list[str]:
    """Keys of the faults."""
    with pytest.raises(ConfigError) as caught:
        checked(words)
    found = caught.value.faults if isinstance(caught.value, ConfigFaults) else [caught.value]
    assert all(fault.expected and fault.next_step for fault in found)
    return [fault.key for fault in found]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("attempts=1", "attempts"),
        ("attempts=1 finetune.rl.advantage_estimator=reinforce_baseline", "attempts"),
        ("attempts=1 finetune.rl.advantage_estimator=reinforce finetune.rl.filter_reward_low=0", "attempts"),
        ("finetune.rl.filter_reward_low=1 finetune.rl.filter_reward_high=0.5", "finetune.rl.filter_reward_low"),
        ("finetune.rl.aggregation=constant_length", "finetune.rl.constant_length_tokens"),
        ("finetune.rl.overlong_buffer_tokens=10", "finetune.rl.overlong_limit_tokens"),
        (
            "finetune.rl.overlong_buffer_tokens=10 finetune.rl.overlong_limit_tokens=9",
            "finetune.rl.overlong_buffer_tokens",
        ),
        ("finetune.rl.target_entropy=0.1 finetune.rl.final_entropy_bonus=0", "finetune.rl.final_entropy_bonus"),
        ("finetune.rl.importance_correction=icepop finetune.rl.importance_low=3", "finetune.rl.importance_low"),
        ("finetune.lora.sync=adapter", "finetune.lora.sync"),
        (f"{ADAPTER} finetune.lora.bias=all", "finetune.lora.bias"),
        (f"{ADAPTER} {KWARGS}.quantization=fp8", f"{KWARGS}.quantization"),
        (f"{ADAPTER} {KWARGS}.load_format=dummy", f"{KWARGS}.load_format"),
        (f"{ADAPTER} {KWARGS}.pipeline-parallel-size=2", f"{KWARGS}.pipeline-parallel-size"),
        (f"{ADAPTER} {COLOCATED}", "world.placement"),
        ("finetune.dtype=tf32 backend.type=fsdp backend.param_dtype=bf16", "backend.param_dtype"),
        ("finetune.dtype=tf32 finetune.attn_implementation=flex_attention", "finetune.attn_implementation"),
        ("finetune.interrupt_train_steps=2000", "finetune.interrupt_train_steps"),
        ("finetune.interrupt_train_steps=0", "finetune.interrupt_train_steps"),
        ("finetune.also_save_steps=[3,0]", "finetune.also_save_steps.1"),
        ("finetune.keep_best=mean_reward test_dataset_names=[]", "finetune.keep_best"),
        ("finetune.keep_best=", "finetune.keep_best"),
        ("finetune.stop_at_success=0.9 eval_every_n_versions=0", "finetune.stop_at_success"),
        ("finetune.stop_at_success=1.5", "finetune.stop_at_success"),
        ("debug.mode=evaluation test_dataset_names=[]", "test_dataset_names"),
        ("finetune.weight_update_interval=4 finetune.max_version_lag=2", "finetune.max_version_lag"),
        ("schedule=conventional finetune.weight_update_interval=4", "finetune.weight_update_interval"),
        ("schedule=conventional steps_per_generation=8 finetune.max_version_lag=6", "finetune.max_version_lag"),
        (f"{KWARGS}.max_model_len=abc", f"{KWARGS}.max_model_len"),
        ("finetune.seq_length=9000", "finetune.seq_length"),
        ("llm.parameters.max_tokens=10000", "llm.parameters.max_tokens"),
        ("llm.parameters.min_tokens=9000", "llm.parameters.min_tokens"),
        ("llm.chat_template_kwargs.tokenize=true", "llm.chat_template_kwargs"),
        ('eval=[{"name":"a"},{"name":"a","k":2}]', "eval"),
        ('eval=[{"name":"a","max_tokens":10000}]', "eval.0.max_tokens"),
        ('eval=[{"name":"a","k":0}]', "eval.0.k"),
        ('eval=[{"k":2}]', "eval.0.name"),
        ('eval=[{"name":"a","seed":2}]', "eval.0.seed"),
        (f"world.device=cpu {KWARGS}.block_size=16", f"{KWARGS}.block_size"),
        ("world.actor_fraction=0", "world.actor_fraction"),
        ("world.finetune_fraction=0", "world.finetune_fraction"),
        ("world.placement=colocated", "schedule"),
        (f"{COLOCATED} world.offload_optimizer=true backend=fsdp", "world.offload_optimizer"),
        (f"{COLOCATED} world.preprocessor_fraction=1", "world.preprocessor_fraction"),
        ("world.servers_per_gpu=2 world.num_actor_llms=1", "world.servers_per_gpu"),
        ("world.actor_gpus=[[0]]", "world.finetune_gpus"),
        ("world.finetune_gpus=[1]", "world.actor_gpus"),
        ("world.actor_gpus=[]", "world.actor_gpus"),
        ("world.actor_gpus=[[0]] world.finetune_gpus=[1] world.preprocessor_fraction=1", "world.preprocessor_gpus"),
        ("world.actor_gpus=[[0]] world.finetune_gpus=[1,1]", "world.finetune_gpus"),
        ("world.actor_gpus=[[0,0]] world.finetune_gpus=[1]", "world.actor_gpus"),
        ("world.actor_gpus=[[]] world.finetune_gpus=[1]", "world.actor_gpus"),
        ("streams.backend=redis streams.url=http://localhost", "streams.url"),
        ("supervise.heartbeat_timeout_s=1", "supervise.heartbeat_timeout_s"),
        ("train_subset.begin=5 train_subset.end=5", "train_subset"),
        ("debug.streams_from=results/y", "debug.streams_from"),
        ("debug.mode=finetune", "debug.streams_from"),
        ("debug.mode=finetune debug.streams_from=x", "debug.streams_from"),
        ("debug.mode=finetune+preprocessor", "debug.mode"),
        ("actor.agent_func_path=a.py", "actor.rollout_policy"),
        ("llm.parameters.temperature=0", "llm.parameters.temperature"),
        ("max_lag=-1", "max_lag"),
        ("finetune.max_version_lag=-1", "finetune.max_version_lag"),
        # The value head begins at 0 and would stay there.
        (f"{GAE} finetune.rl.value_loss_coef=0", "finetune.rl.value_loss_coef"),
    ],
)
def test_what_is_refused_and_under_which_key(words: str, key: str) -> None:
    assert key in faults(words)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("finetune.rl.kl_coef=0.1 finetune.rl.reference=servers", "finetune.rl.reference"),
        ("finetune.rl.final_kl_coef=0.1 finetune.rl.reference=servers", "finetune.rl.reference"),
        (
            "finetune.rl.kl_coef=0.1 finetune.rl.reference=servers world.preprocessor_fraction=1 "
            "world.num_preprocessor_llms=0",
            "finetune.rl.reference",
        ),
        (
            "finetune.rl.kl_coef=0.1 world.preprocessor_fraction=1 llm.parameters.temperature=0.7",
            "llm.parameters.temperature",
        ),
    ],
)
def test_m4_a_kl_term_whose_reference_cannot_answer_is_refused(words: str, key: str) -> None:
    assert faults(words) == [key]


@pytest.mark.parametrize("word", ["llm.parameters.top_p=0.99", "llm.parameters.top_k=1000"])
def test_t4_sampling_from_a_truncated_distribution_is_refused_in_training(word: str) -> None:
    with pytest.raises(ConfigError, match="would bias the policy"):
        compose(["output_dir=x", word])
    assert checked(f"test_{word}")


def test_d8_on_policy_training_updates_after_every_step() -> None:
    assert faults("max_lag=0 finetune.weight_update_interval=2") == ["finetune.weight_update_interval"]


@pytest.mark.parametrize(
    "words",
    [
        "attempts=1 finetune.rl.advantage_estimator=reinforce finetune.rl.normalize_reward=true",
        "attempts=1 finetune.rl.advantage_estimator=my_task.estimator",
        "finetune.rl.filter_reward_low=0 finetune.rl.filter_reward_high=1",
        "finetune.rl.kl_coef=0.1 llm.parameters.temperature=0.7",
        "finetune.rl.reward_minus_kl_coef=0.1 llm.parameters.temperature=0.7",
        "finetune.rl.kl_coef=0.1 world.preprocessor_fraction=1",
        "finetune.rl.kl_coef=0.1 world.preprocessor_fraction=1 finetune.rl.reference=local "
        "llm.parameters.temperature=0.7",
        f"{COLOCATED} finetune.rl.reward_minus_kl_coef=0.1",
        f"{COLOCATED} world.offload_optimizer=true world.sleep_level='2'",
        f"{COLOCATED} finetune.lora.enabled=true",
        "finetune.rl.overlong_buffer_tokens=10 finetune.rl.overlong_limit_tokens=10",
        "finetune.rl.aggregation=constant_length finetune.rl.constant_length_tokens=100",
        "finetune.lora.enabled=true finetune.lora.bias=all finetune.lora.r=513",
        "finetune.interrupt_train_steps=1000",
        "finetune.seq_length=10000",
        "finetune.stop_at_success=1 finetune.save_checkpoint_minutes=0.5",
        "debug.mode=evaluation world.finetune_fraction=0",
        "test_llm.parameters.temperature=0",
        'eval=[{"name":"a","k":4,"temperature":0},{"name":"b"}] finetune.keep_best=mean_reward test_dataset_names=[]',
        "llm.chat_template_kwargs.enable_thinking=false",
        "world.actor_fraction=0 world.num_actor_llms=1",
        "world.servers_per_gpu=2 world.num_actor_llms=3",
        "world.servers_per_gpu=2 world.num_actor_llms=1 world.device=cpu",
        "world.servers_per_gpu=2 world.actor_gpus=[[0]] world.finetune_gpus=[0]",
        "world.finetune_fraction=0 debug.mode=actor",
        "debug.mode=finetune debug.streams_from=results/y world.actor_fraction=0",
        "debug.mode=preprocessor debug.streams_from=results/y",
        "streams.backend=redis streams.url=redis://localhost:1/0",
        "schedule=concurrent finetune.weight_update_interval=2",
        "schedule=conventional steps_per_generation=8 finetune.max_version_lag=7",
    ],
)
def test_the_neighbor_of_a_mistake_is_accepted(words: str) -> None:
    assert checked(words)


def test_sets_of_evaluations_sample_like_the_others_in_what_they_leave_out() -> None:
    own = '[{"name":"a","k":4,"temperature":0.5,"stop":["x"]},{"name":"c","top_k":3}]'
    others = "test_llm.parameters.top_p=0.9 test_llm.parameters.max_tokens=7"
    config = checked(f"eval={own} test_dataset_names=[a,b] {others}")
    assert config.plain_test_names == ["b"] and config.is_evaluated
    plain, first, second = config.evaluation_parameters
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_tokens, plain.stop) == (1.0, 0.9, -1, 7, [])
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.stop) == (0.5, 0.9, -1, 7, ["x"])
    assert (second.temperature, second.top_k) == (1.0, 3)


def test_several_faults_are_one_error() -> None:
    assert faults("attempts=1 supervise.heartbeat_timeout_s=1") == ["attempts", "supervise.heartbeat_timeout_s"]
    assert faults("seed=-1 llm.parameters.temperature=0 finetune.rl.dual_clip=2") == [
        "seed",
        "finetune.rl.dual_clip",
        "llm.parameters.temperature",
    ]


def test_lists_of_gpus_say_the_counts() -> None:
    world = checked("world.actor_gpus=[[0],[0]] world.preprocessor_gpus=[[1]] world.finetune_gpus=[1,0]").world
    assert (world.num_actor_llms, world.num_preprocessor_llms, world.num_finetune_ranks) == (2, 1, 2)


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        ("eval_every_n_versions=78000", "eval_every_n_versions=78000"),
        ("finetune.keep_best=success", "success_rate"),
        ("finetune.keep_best=reward", "mean_reward"),
        ("finetune.rl.entropy_bonus_step=0.1", "finetune.rl.entropy_bonus_step"),
        ("finetune.rl.kl_coef=0.1 finetune.rl.kl_estimator=k1", "finetune.rl.kl_estimator=k1"),
        ("finetune.num_warmup_steps=1000", "finetune.num_warmup_steps=1000"),
        (f"{KWARGS}.max-num-seqs=8", "max-num-seqs=8"),
        ("environment._target_=my.Game", "world.env_replicas=1"),
        ("world.env_replicas=2", "environment._target_"),
        ("finetune.dtype=fp32", "backend=plain"),
        (f"finetune.dtype=tf32 {KWARGS}.dtype=float16", "float16"),
        ("finetune.dtype=fp32 backend=plain finetune.lora.enabled=true", "rl/logprob_abs_diff_on_policy"),
        ("dataset_loader=null", "dataset_loader"),
        ("agent.max_steps=3", "agent.max_steps"),
    ],
)
def test_what_is_probably_not_meant_gets_one_remark(words: str, subject: str) -> None:
    (remark,) = advice(checked(words))
    assert subject in remark and "\n" not in remark


@pytest.mark.parametrize(
    "words",
    [
        "eval_every_n_versions=0",
        "eval_every_n_versions=999",
        "finetune.keep_best=success_rate",
        "finetune.keep_best=exact_matches",
        "finetune.max_train_steps=50 finetune.num_warmup_steps=1",
        "finetune.rl.target_entropy=0.1 finetune.rl.entropy_bonus_step=0.1",
        f"finetune.dtype=fp32 backend=plain {ADAPTER}",
        "finetune.dtype=fp32 backend=fsdp",
        f"finetune.dtype=fp32 {KWARGS}.dtype=float32",
        "finetune.dtype=bf16 finetune.lora.enabled=true",
    ],
)
def test_what_works_gets_no_remark(words: str) -> None:
    assert advice(checked(words)) == []


def test_a_deepspeed_file_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    for text in ("{bad", "[1]", "{}", '{"zero_optimization": {"stage": 0}}', '{"zero_optimization": 1}'):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_deepspeed_file(str(file))
        assert (caught.value.key, caught.value.got) == ("backend.config", str(file))
    with pytest.raises(ConfigError):
        compose(["output_dir=x", f"backend.config={file}"])
    file.write_text('{"zero_optimization": {"stage": 2}}')
    assert compose(["output_dir=x", f"backend.config={file}"]).notes == []


@pytest.mark.parametrize(
    ("preset", "aggregation"), [("base", "sample"), ("grpo", "sample_mean"), ("gspo", "sample_mean"), ("ppo", "sample")]
)
def test_the_denominator_of_a_preset_is_that_of_its_paper(preset: str, aggregation: str) -> None:
    composed = compose(["output_dir=x", f"finetune={preset}"])
    assert composed.notes == []
    assert composed.config is not None and composed.config.finetune.rl.aggregation == aggregation


@pytest.mark.parametrize(
    ("value", "read"),
    [
        *[("4g", 4 * 10**9), ("4G", 4 * 2**30), ("10k", 10_000), ("10K", 10_240), ("25.6k", 25_600)],
        *[("0.5t", 5 * 10**11), ("4096", 4096), (4096, 4096), (" 16 ", 16)],
        *[("1.5K", None), ("1.5", None), ("4gb", None), ("", None), ("auto", None)],
        *[(-1, None), (None, None), (True, None)],
    ],
)
def test_numbers_of_servers_are_read_as_vllm_does(value: Any, read: int | None) -> None:
    for key in ("kv_cache_memory_bytes", "kv-cache-memory-bytes"):
        assert VLLMConfig(vllm_kwargs={key: value}).number("kv-cache-memory-bytes") == read
