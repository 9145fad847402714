"""What became of PipelineRL's keys that this schema does not have. Pure data and functions on plain mappings."""

from __future__ import annotations

_STREAM_IS_QUEUE = "the stream is the queue"
_STREAM_NAMES = "the names of the streams are fixed"
_NO_SHARED_MEMORY = "records travel in streams, not in shared memory"
_ACTOR_EVALUATES = "the actor evaluates"
_SERVERS_BATCH = "the servers batch requests themselves"
_WHOLE_GROUPS = "whole groups are handed out"

#: Keys that have no counterpart because nothing here needs them, and why.
DROPPED: dict[str, str] = {
    "jobs": "the launcher plans the jobs and writes conf/world.json",
    "me": "each process is told its job on the command line",
    "hydra": "a run writes its files and logs to output_dir",
    "accelerate_config": "the launcher starts the ranks itself",
    "fp32_layer_prefix": "the output head is found by the structure of the model",
    "actor.problem_queue_size": "max_lag and llm_max_rollouts bound what is in flight",
    "actor.result_queue_size": "finished groups go straight to the stream",
    "actor.shared_memory_entry_size": _NO_SHARED_MEMORY,
    "actor.chunk_size": _WHOLE_GROUPS,
    "actor.sampling": "the order of problems follows from seed",
    "actor.submit_delay": "the servers' slots set the pace",
    "preprocess.shared_memory_entry_size": _NO_SHARED_MEMORY,
    "preprocess.n_workers": "one process keeps up: it neither tokenizes nor loads a model",
    "preprocess.raw_queue_size": _STREAM_IS_QUEUE,
    "preprocess.queue_size": _STREAM_IS_QUEUE,
    "preprocess.input_queue_size": _STREAM_IS_QUEUE,
    "preprocess.output_queue_size": _STREAM_IS_QUEUE,
    "preprocess.input": _STREAM_NAMES,
    "preprocess.output": _STREAM_NAMES,
    "preprocess.log_every_n_samples": "every batch is logged",
    "preprocess.dataset_buffer_size": "a batch closes as soon as it has its samples",
    "preprocess.max_ready_samples_per_lead": "all ranks read the same record",
    "preprocess.chunk_size": _WHOLE_GROUPS,
    "preprocess.submit_delay": _SERVERS_BATCH,
    "preprocess.threads_per_llm": _SERVERS_BATCH,
    "finetune.input": _STREAM_NAMES,
    "finetune.data": _STREAM_NAMES,
    "finetune.output_dir": "models and checkpoints are always in output_dir/finetune",
    "finetune.config_name": "a model's own config is in the folder of model_path",
    "finetune.fp32_layer_prefix": "the output head is found by the structure of the model",
    "finetune.cuda_empty_cache": "the allocator's cache is left alone",
    "finetune.queue_size": _STREAM_IS_QUEUE,
    "finetune.valid_batch_size": _ACTOR_EVALUATES,
    "finetune.eval_callback": _ACTOR_EVALUATES,
    "finetune.max_eval_steps": _ACTOR_EVALUATES,
    "finetune.auto_device_map": "each rank owns one device",
    "finetune.resume_dataloader": "data always resume at the checkpoint",
    "finetune.use_safetensors": "models are always saved as safetensors",
    "finetune.n_examples": "the number of samples follows from finetune.max_train_steps",
    "finetune.sft_config_name": "there is no supervised objective",
    "finetune.lora.task_type": "the model is a causal language model",
    "finetune.lora.dropout": "dropout is off: the policy ratio must come from the weights alone",
    "finetune.rl.batch_size": "a step has train_batch_size * gradient_accumulation_passes samples",
    "vllm_config.use_v1": "vLLM has one engine",
    "world.preprocessors": "one preprocessor keeps up with all servers",
    "debug.place_inference_workers": "debug.mode decides which servers start",
}

#: Keys with another name here.
RENAMED: dict[str, str] = {
    "finetune.attempts": "attempts",
    "finetune.max_lag": "max_lag",
    "finetune.pop_old_data": "pop_old_data",
    "preprocess.pop_old_data": "pop_old_data",
    "finetune.force_restart": "force_restart",
    "finetune.fp32_lm_head": "fp32_lm_head",
    "finetune.seed": "seed",
    "finetune.rl.temperature": "llm.parameters.temperature",
    "finetune.rl.algo": "finetune.rl.policy_loss",
    "actor.threads_per_llm": "actor.llm_max_rollouts",
    "agent.max_epochs": "finetune.max_epochs",
    "system_prompt": "actor.system_prompt",
    "task_template": "actor.task_template",
    "actor.task_prompt": "custom.task_prompt",
    "discount_factor": "actor.discount_factor",
    "weight_broadcast": "finetune.send_weight_updates",
    "world.actors": "actor.rollout_workers",
    **{
        f"finetune.{name}": f"wandb.{name}"
        for name in (
            *("tags", "wandb_id", "wandb_name", "wandb_entity_name", "wandb_project_name"),
            *("wandb_resume", "wandb_use_basename", "wandb_workspace_root", "wandb_group", "wandb_dir"),
        )
    },
}

#: Keys that ask for what is not there: the one value that asks for nothing, and what to do otherwise.
UNSUPPORTED: dict[str, tuple[object, str]] = {
    "finetune.seq_parallel": (1, "use gradient checkpointing, or ZeRO-3"),
    "finetune.lora.base_model_8bit": (False, "the servers sample from unquantized weights"),
    "finetune.lora.base_model_4bit": (False, "the servers sample from unquantized weights"),
    "finetune.optim": ("adamw_torch", "AdamW is the only optimizer"),
    "finetune.objective": ("rl", "reinforcement learning is the only objective"),
    "finetune.rl.aggregate_loss": ("sum", "finetune.rl.aggregation names the denominator"),
    "llm.parameters.top_p": (1, "truncated sampling would bias the policy: set test_llm.parameters.top_p"),
    "llm.parameters.top_k": (-1, "truncated sampling would bias the policy: set test_llm.parameters.top_k"),
    "llm.chat_template_kwargs": ({}, "put a chat template into the model's folder"),
    "test_llm.chat_template_kwargs": ({}, "put a chat template into the model's folder"),
    "world.replicas": (1, "one actor serves all servers: set world.num_actor_llms and actor.rollout_workers"),
    "debug.use_existing_llms": (False, "a run starts its own servers"),
    "environments": ([], "a run has one environment: set environment"),
    "environment_key": (None, "a run has one environment: set environment"),
    "use_fast_llm": (False, "there is one trainer: set finetune"),
    "fast_llm": ({}, "there is one trainer: set finetune"),
    "finetune.rl.epsilon": (None, "set finetune.rl.epsilon_low and finetune.rl.epsilon_high"),
    "finetune.rl.group_normalization": (None, "set finetune.rl.aggregation=group"),
    "streams.host": (None, "set streams.url=redis://HOST:PORT/0"),
    "streams.port": (None, "set streams.url=redis://HOST:PORT/0"),
}


#: Keys that `convert` rewrites together with others: what to write now.
REWRITTEN: dict[str, str] = {
    "use_deepspeed": "backend=deepspeed or backend=plain",
    "deepspeed_config": "backend.config, with backend=deepspeed",
    "use_fsdp": "backend=fsdp",
    "fsdp": "backend.param_dtype and backend.reduce_dtype, with backend=fsdp",
    "finetune.model_class": "finetune.rl.advantage_estimator=gae for a value head; else leave it out",
    "finetune.load_as_bf16": "finetune.dtype",
    "finetune.use_flash_attention": "finetune.attn_implementation",
    "finetune.critic_learning_rate": "finetune.rl.critic_learning_rate",
    "wandb.use_wandb": "wandb.mode=disabled for no W&B, offline or online otherwise",
    "finetune.use_wandb": "wandb.mode=disabled for no W&B, offline or online otherwise",
    "finetune.rl.use_advantages": "finetune.rl.advantage_estimator=reinforce for plain rewards",
}


def fate_of(key: str) -> str | None:
    """Return one sentence on what became of a key of PipelineRL (or of a key below it); None: it never was one."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in RENAMED:
            return f"It is {RENAMED[name]} now."
        if name in REWRITTEN:
            return f"Set {REWRITTEN[name]}."
        if name in DROPPED:
            return f"It is gone: {DROPPED[name]}."
        if name in UNSUPPORTED:
            return f"It is not supported: {UNSUPPORTED[name][1]}."
    return None
