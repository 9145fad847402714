"""Two commands of another trainer, translated flag by flag as docs/agents.md says: they compose, and fit 8 GPUs.

One trains asynchronously with two servers and six trainer GPUs, the other alternates on all eight.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelinerl.config.compose import ComposedConfig, compose
from pipelinerl.config.run import RunConfig
from pipelinerl.world import Cluster, ClusterNode, WorldMap, build_world_map

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
# Flag, or the words of the table for what is left at its default: our overrides.
BOTH = {
    "--pretrain": ["model_path=org/llama-8b"],
    "--prompt_data": ["agent.prompt_data=org/prompts"],
    "--input_key": ["agent.input_key=context_messages"],
    "--apply_chat_template": ["agent.apply_chat_template=true"],
    "--prompt_max_len": ["agent.prompt_max_len=1024"],
    "--generate_max_len": ["llm.parameters.max_tokens=1024", "vllm_config.vllm_kwargs.max_model_len=2048"],
    "--max_epochs": [],
    "--n_samples_per_prompt": ["attempts=8"],
    "--micro_train_batch_size": [],
    "--micro_rollout_batch_size": [],
    "--packing_samples": ["finetune.seq_packing=true"],
    "--zero_stage": [],
    "--bf16": [],
    "--gradient_checkpointing": ["finetune.gradient_checkpointing=true"],
    "--ref_num_nodes": [],
    "--ref_num_gpus_per_node": [],
    "--actor_num_nodes": [],
    "loss": ["finetune.rl.policy_loss=ppo", "finetune.rl.aggregation=token"],
    "--max_norm": ["finetune.gradient_clipping_threshold=1.0"],
}
ASYNCHRONOUS = {
    **BOTH,
    "--actor_num_gpus_per_node": ["world.finetune_fraction=6"],
    "--vllm_num_engines": ["world.num_actor_llms=2", "world.actor_fraction=2"],
    "--vllm_tensor_parallel_size": ["vllm_config.vllm_kwargs.tensor-parallel-size=1"],
    "--async_train": [],
    "--colocate_all_models` with `--async_train": [],
    "--max_samples": ["agent.max_samples=12500"],
    "--train_batch_size": ["finetune.train_batch_size=1", "finetune.gradient_accumulation_passes=192"],
    "OPENRLHF_ASYNC_QUEUE_SIZE": ["max_lag=1536"],
    "--advantage_estimator reinforce_baseline": ["finetune.rl.advantage_estimator=reinforce_baseline"],
    "--normalize_reward": [],
    "--init_kl_coef C --use_kl_loss": ["finetune.rl.kl_coef=1e-3"],
    "--kl_estimator": ["finetune.rl.kl_estimator=k2"],
    "--actor_learning_rate": ["finetune.learning_rate=1e-6"],
    "--adam_offload": ["backend.config=deepspeed_stage3_bf16_offload"],
    "--lr_warmup_ratio": ["finetune.num_warmup_steps=16"],
}
SYNCHRONOUS = {
    **BOTH,
    "--actor_num_gpus_per_node": [],
    "--vllm_num_engines": ["world.num_actor_llms=4"],
    "--vllm_tensor_parallel_size": ["vllm_config.vllm_kwargs.tensor-parallel-size=2"],
    "--vllm_gpu_memory_utilization": ["vllm_config.vllm_kwargs.gpu-memory-utilization=0.6"],
    "--vllm_sync_backend": [],
    "--vllm_enable_sleep": [],
    "--deepspeed_enable_sleep": ["backend.config=deepspeed_stage3_bf16_offload"],
    "--enforce_eager": ['vllm_config.vllm_kwargs.enforce-eager=""'],
    "--colocate_all_models` without `--async_train": [
        "world.placement=colocated",
        "schedule=conventional",
        "max_lag=null",
    ],
    "--max_samples": ["agent.max_samples=100000"],
    "--num_episodes": ["finetune.max_train_steps=6250"],
    "--train_batch_size": ["finetune.train_batch_size=1", "finetune.gradient_accumulation_passes=128"],
    "--rollout_batch_size": ["steps_per_generation=8"],
    "--advantage_estimator group_norm": ["finetune.rl.advantage_estimator=grpo"],
    "--init_kl_coef C --use_kl_loss": ["finetune.rl.kl_coef=1e-3"],
    "--kl_estimator": ["finetune.rl.kl_estimator=k3"],
    "--actor_learning_rate": ["finetune.learning_rate=5e-7"],
    "--critic_learning_rate": [],
    "--save_hf_ckpt": [],
    "--lr_warmup_ratio": ["finetune.num_warmup_steps=188"],
}


@dataclass
class CountingPorts:
    """Hands out every port once, without looking at the machine."""

    taken: set[int] = field(default_factory=set)

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        port = preferred
        while port in self.taken:
            port += 1
        self.taken.add(port)
        return port


def composed(command: dict[str, list[str]], folder: Path) -> tuple[ComposedConfig, RunConfig]:
    file = folder / "agent_func.py"
    file.write_text("async def step(state, action, label, **kwargs): ...\n")
    words = ["--config-name", "agent", f"output_dir={folder}/run", f"actor.agent_func_path={file}"]
    result = compose([*words, *(override for overrides in command.values() for override in overrides)])
    assert result.config is not None
    return result, result.config


@pytest.mark.parametrize(
    ("command", "name", "steps"),
    [(ASYNCHRONOUS, "async", 12500 * 8 // 192 + 1), (SYNCHRONOUS, "sync", 100000 * 8 // 128)],
)
def test_the_whole_command_is_what_the_table_gives(
    command: dict[str, list[str]], name: str, steps: int, tmp_path: Path
) -> None:
    lines = (PAGE.parent / "from_pipelinerl.md").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if f"output_dir=results/llama3-8b-{name} " in line]
    unlike = {"all": ["agent.action_special_tokens=true", f"finetune.max_train_steps={steps}"]}
    _, expected = composed({**command, **unlike}, tmp_path)
    places = [f"output_dir={tmp_path}/run", f"actor.agent_func_path={tmp_path}/agent_func.py"]
    given = ["model_path=org/llama-8b", "agent.prompt_data=org/prompts"]
    assert compose([*shlex.split(line)[3:], *places, *given]).config == expected


def plan(config: RunConfig) -> WorldMap:
    cluster = Cluster((ClusterNode("h", tuple(map(str, range(8))), 64),))
    return build_world_map(config, cluster, CountingPorts())


def gpus_of(world: WorldMap, kind: str) -> list[list[str]]:
    return [job.gpus for job in world.jobs_of(kind)]


def test_the_asynchronous_command(tmp_path: Path) -> None:
    """Two servers with one GPU each, six trainer ranks, each with the reference model."""
    result, config = composed(ASYNCHRONOUS, tmp_path)
    assert result.notes == []
    world = plan(config)
    assert gpus_of(world, "actor_llm") == [["0"], ["1"]] and gpus_of(world, "preprocessor_llm") == []
    assert gpus_of(world, "finetune") == [["2"], ["3"], ["4"], ["5"], ["6"], ["7"]]
    assert (config.schedule, config.max_lag, config.finetune.samples_per_step) == ("pipeline", 192 * 8, 192)
    assert config.uses_local_reference(config.has_reference_pool) and config.finetune.max_epochs == 1


def test_the_synchronous_command(tmp_path: Path) -> None:
    """Four servers with two GPUs each, a trainer rank on each GPU. 128 prompts with 8 samples are 8 steps of 128."""
    result, config = composed(SYNCHRONOUS, tmp_path)
    assert result.notes == []
    world = plan(config)
    assert gpus_of(world, "actor_llm") == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert gpus_of(world, "preprocessor_llm") == []
    assert gpus_of(world, "finetune") == [[str(gpu)] for gpu in range(8)]
    assert config.steps_per_generation * config.finetune.samples_per_step == 128 * 8
    assert config.uses_local_reference(config.has_reference_pool)


@pytest.mark.parametrize("command", [ASYNCHRONOUS, SYNCHRONOUS])
def test_the_table_has_a_row_with_these_keys_for_each_flag(command: dict[str, list[str]]) -> None:
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for flag, overrides in command.items():
        answers = [answer for left, answer in rows if re.search(rf"(?<![\w-]){re.escape(flag)}(?!\w)", left)]
        assert answers, f"docs/agents.md has no row for {flag}"
        for key in (override.partition("=")[0] for override in overrides):
            assert any(key in answer for answer in answers), f"{flag}: no row names {key}"
