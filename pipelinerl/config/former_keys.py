"""Names of keys that this schema does not have: what became of PipelineRL's, and what ours are called elsewhere."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

#: Keys that have no counterpart because nothing here needs them, by the reason.
_GONE = {
    "the launcher plans the jobs and writes conf/world.json": "jobs",
    "each process is told its job on the command line": "me",
    "a run writes its files and logs to output_dir": "hydra",
    "the launcher starts the ranks itself": "accelerate_config",
    "the output head is found by the structure of the model": "fp32_layer_prefix finetune.fp32_layer_prefix",
    "rates are those of the last 50 groups": "actor.throughput_window_size",
    "the actor's metrics are recorded every 5 seconds and at each version": "actor.log_each_n_secs",
    "max_lag and llm_max_rollouts bound what is in flight": "actor.problem_queue_size",
    "finished groups go straight to the stream": "actor.result_queue_size",
    "records travel in streams, not in shared memory": (
        "actor.shared_memory_entry_size preprocess.shared_memory_entry_size"
    ),
    "whole groups are handed out": "actor.chunk_size preprocess.chunk_size preprocess.chunk_n_groups",
    "the order of problems follows from seed": "actor.sampling",
    "the servers' slots set the pace": "actor.submit_delay",
    "nothing reads it": "actor.ensure_boxed_answers rewards.name",
    "one process keeps up: it neither tokenizes nor loads a model": "preprocess.n_workers",
    "the stream is the queue": (
        "preprocess.raw_queue_size preprocess.queue_size preprocess.input_queue_size preprocess.output_queue_size "
        "finetune.queue_size"
    ),
    "the names of the streams are fixed": "preprocess.input preprocess.output finetune.input finetune.data",
    "every batch is logged": "preprocess.log_every_n_samples",
    "a batch closes as soon as it has its samples": "preprocess.dataset_buffer_size",
    "all ranks read the same record": "preprocess.max_ready_samples_per_lead",
    "the servers batch requests themselves": "preprocess.submit_delay preprocess.threads_per_llm",
    "models and checkpoints are always in output_dir/finetune": "finetune.output_dir",
    "a model's own config is in the folder of model_path": "finetune.config_name",
    "the trainer's memory is among the metrics": "finetune.memory_debug",
    "the allocator's cache is left alone": "finetune.cuda_empty_cache",
    "the actor evaluates": "finetune.valid_batch_size finetune.eval_callback finetune.max_eval_steps",
    "each rank owns one device": "finetune.auto_device_map",
    "data always resume at the checkpoint": "finetune.resume_dataloader",
    "checkpointing is of the newer kind": "finetune.reentrant_checkpointing",
    "every step is logged": "finetune.log_each_n_steps",
    "models are always saved as safetensors": "finetune.use_safetensors",
    "the number of samples follows from finetune.max_train_steps": "finetune.n_examples",
    "there is no supervised objective": "finetune.sft_config_name",
    "the model is a causal language model": "finetune.lora.task_type",
    "dropout is off: the policy ratio must come from the weights alone": "finetune.lora.dropout",
    "a step has train_batch_size * gradient_accumulation_passes samples": "finetune.rl.batch_size",
    "vLLM has one engine": "vllm_config.use_v1",
    "vLLM schedules every step": "vllm_config.vllm_kwargs.num-scheduler-steps",
    "servers answer with token ids": "vllm_config.vllm_kwargs.return-tokens-as-token-ids",
    "tool calls are read from the text of the answer": (
        "vllm_config.vllm_kwargs.enable-auto-tool-choice vllm_config.vllm_kwargs.tool-call-parser "
        "vllm_config.vllm_kwargs.tool-parser-plugin"
    ),
    "a tracked run is called like the last part of output_dir, or wandb.wandb_name": (
        "wandb.wandb_use_basename wandb.wandb_workspace_root finetune.wandb_use_basename finetune.wandb_workspace_root"
    ),
    "the files of W&B are in output_dir": "wandb.wandb_dir finetune.wandb_dir",
    "a resumed run continues its W&B run": "wandb.wandb_resume finetune.wandb_resume",
    "the launcher's Redis server keeps what a resume needs": "streams.save",
    "each rollout worker grades; world.verifier_replicas adds services": "environment_key world.env_replicas_per_actor",
    "the limits of a test are fixed: 4 s of processor time, 16 s with waiting": "sandbox_timeout",
    "one preprocessor keeps up with all servers": "world.preprocessors",
    "actor.max_failure_rate counts once 32 rollouts have ended": "actor.min_rollouts_for_failure_rate",
    "an answer may take 300 s in a verifier service, queue included": "verifier.queue_timeout_s",
    "8192 answers may wait in a verifier service, and more are sent again later": "verifier.max_queue",
    "supervise.max_server_restarts counts the restarts of the last hour": "supervise.server_restart_window_s",
    "event files are in output_dir/tensorboard": "tensorboard.folder",
    "debug.mode decides which servers start": "debug.place_inference_workers",
}
DROPPED: dict[str, str] = {key: reason for reason, keys in _GONE.items() for key in keys.split()}

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
    "finetune.critic_learning_rate": "finetune.rl.critic_learning_rate",
    "actor.threads_per_llm": "actor.llm_max_rollouts",
    "actor.max_rollout_retries": "actor.max_retries",
    "actor.ifeval_partial_credit": "custom.partial_score",
    "vllm_config.quantization": "vllm_config.vllm_kwargs.quantization",
    "vllm_config.vllm_kwargs.max-num-seq": "vllm_config.vllm_kwargs.max-num-seqs",
    "agent.max_epochs": "finetune.max_epochs",
    "system_prompt": "actor.system_prompt",
    "task_template": "actor.task_template",
    "actor.task_prompt": "custom.task_prompt",
    "discount_factor": "actor.discount_factor",
    "world.actors": "actor.rollout_workers",
    **{
        f"finetune.{name}": f"wandb.{name}"
        for name in (
            *("tags", "wandb_id", "wandb_name", "wandb_entity_name", "wandb_project_name"),
            "wandb_group",
        )
    },
}


class Values(NamedTuple):
    """What the values of a key are here: key and value, or None for one that asks for nothing. `otherwise` says what to
    do about other values; empty: the key is in `RENAMED` too."""

    here: Mapping[Any, tuple[str, Any] | None]
    otherwise: str = ""

    def of(self, value: object) -> tuple[str, Any] | str | None:
        """Key and value here, None if `value` asks for nothing, or `otherwise`."""
        if value is None or value in ([], {}):
            return None
        return self.here.get(value, self.otherwise) if isinstance(value, Hashable) else self.otherwise


def _switch(asks_for_nothing: bool, key: str, value: str) -> Values:
    return Values({asks_for_nothing: None, not asks_for_nothing: (key, value)}, "write true or false")


_RL = "finetune.rl"
_NO_TRUNCATION = "truncated sampling would bias the policy: set test_llm.parameters"
_ONE_TRAINER = "there is one trainer: set finetune"
#: Keys whose values are keys here, or ask for what is not there.
VALUES: dict[str, Values] = {
    "finetune.load_as_bf16": _switch(True, "finetune.dtype", "fp32"),
    "finetune.use_flash_attention": _switch(True, "finetune.attn_implementation", "segments"),
    "finetune.send_weight_updates": _switch(True, "debug.mode", "open_loop"),
    "weight_broadcast": _switch(True, "debug.mode", "open_loop"),
    "wandb.use_wandb": _switch(True, "wandb.mode", "disabled"),
    "finetune.use_wandb": _switch(True, "wandb.mode", "disabled"),
    "finetune.rl.use_advantages": _switch(True, f"{_RL}.advantage_estimator", "reinforce"),
    "finetune.rl.group_normalization": _switch(False, f"{_RL}.aggregation", "group"),
    "finetune.rl.aggregate_loss": Values(
        {"sum": None, "mean": (f"{_RL}.aggregation", "sample_mean")}, f"{_RL}.aggregation names the denominator"
    ),
    "finetune.model_class": Values(
        {
            "causal-language-modeling": None,
            "causal-language-modeling-with-value-head": (f"{_RL}.advantage_estimator", "gae"),
        },
        "only causal language models can be trained",
    ),
    "vllm_config.quantization": Values({"bf16_last_layer_fp32": ("fp32_lm_head", True)}),
    "actor.task_prompt": Values({"": None}),
    "finetune.seq_parallel": Values({1: None}, "use gradient checkpointing, or ZeRO-3"),
    "finetune.lora.base_model_8bit": Values({False: None}, "the servers sample from unquantized weights"),
    "finetune.lora.base_model_4bit": Values({False: None}, "the servers sample from unquantized weights"),
    "finetune.optim": Values({"adamw_torch": None}, "AdamW is the only optimizer"),
    "finetune.objective": Values({"rl": None}, "reinforcement learning is the only objective"),
    "finetune.rl.clamp_log_ratio_ref_new_value": Values({5: None}, "log ratios in KL are clamped to 5"),
    "llm.parameters.top_p": Values({1: None}, f"{_NO_TRUNCATION}.top_p"),
    "llm.parameters.top_k": Values({-1: None}, f"{_NO_TRUNCATION}.top_k"),
    "test_llm.chat_template_kwargs": Values({}, "llm.chat_template_kwargs holds in evaluations too"),
    "world.replicas": Values(
        {1: None}, "one actor serves all servers: set world.num_actor_llms and actor.rollout_workers"
    ),
    "debug.use_existing_llms": Values({False: None}, "a run starts its own servers"),
    "environments": Values({}, "a run has one environment: set environment"),
    "actor.domain_mix": Values({}, "dataset_loader_params.domains of pipelinerl.domains.multi has the weights"),
    "actor.domain_rollouts": Values({}, "dataset_loader_params.domains of pipelinerl.domains.multi names the tasks"),
    "use_fast_llm": Values({False: None}, _ONE_TRAINER),
    "fast_llm": Values({}, _ONE_TRAINER),
}

#: Keys that `convert` rewrites together: what to write now.
REWRITTEN: dict[str, str] = {
    "use_deepspeed": "backend=deepspeed or backend=plain",
    "deepspeed_config": "backend.config, with backend=deepspeed",
    "use_fsdp": "backend=fsdp",
    "fsdp": "backend.param_dtype and backend.reduce_dtype, with backend=fsdp",
    "finetune.rl.epsilon": "finetune.rl.epsilon_low and finetune.rl.epsilon_high",
    "streams.host": "streams.url=redis://HOST:PORT/0",
    "streams.port": "streams.url=redis://HOST:PORT/0",
}

#: Functions of PipelineRL's own tasks that are somewhere else here.
MOVED: dict[str, str] = {
    "pipelinerl.domains.math.load_datasets": "pipelinerl.domains.math.load_problems",
    **{
        f"pipelinerl.domains.{domain}.dataset.load_problems": f"pipelinerl.domains.{domain}.load_problems"
        for domain in ("coding", "fn_calling", "ifeval", "logic")
    },
}
#: Data sets of PipelineRL's own tasks: the same kind of problems under another name.
DATA_SETS: dict[str, str] = {"train_counting_problems": "train", "test_counting_problems": "test"}
#: Data sets that no task here knows by name.
LACKING_DATA: dict[str, str] = {
    **dict.fromkeys(
        ("fn_calling", "fn_calling_train", "fn_calling_test"),
        "BFCL has names by its kinds, and no parts: bfcl_simple, bfcl_multiple, bfcl_parallel, bfcl_parallel_multiple",
    ),
    **dict.fromkeys(
        ("logic", "logic_train", "logic_test"),
        "the puzzles of INTELLECT-3-RL: train and test are puzzles of reasoning-gym (dataset_loader_params.families)",
    ),
}
_OF_ROWS = {"seed": "seed", "max_examples": "limit"}
#: Arguments of the loaders of PipelineRL's own tasks that ours have too, by task, under their names here.
LOADER_ARGUMENTS: dict[str, dict[str, str]] = {
    "math": _OF_ROWS,
    "coding": {**_OF_ROWS, "max_tests_per_problem": "max_tests"},
    "fn_calling": _OF_ROWS,
    "ifeval": _OF_ROWS,
    "logic": {"seed": "seed"},
}
_PARTS = "the name of a data set says which part of it"
#: What became of others.
DROPPED_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(("split", "taco_split", "apps_split", "subset", "train_ratio", "test_size"), _PARTS),
    "taco_excluded_difficulties": "write {name: taco, filter: {difficulty: {not: [...]}}} in train_dataset_names",
    "huggingface_token": "the hub's library reads HF_TOKEN itself",
    "max_prompt_tokens": "a prompt that leaves no room in the context fails its rollout",
}
#: Tasks that are not here, by the beginning of their functions' names.
LACKING: dict[str, str] = {
    "pipelinerl.domains.chartqa.": "a task about pictures: models get text only",
    "pipelinerl.domains.miniwob.": "a task in a web browser, played by the agent framework TapeAgents",
    "pipelinerl.domains.counting.tapeagent.": "it needs the agent framework TapeAgents",
    "pipelinerl.domains.deep_research.": "it needs the agent framework TapeAgents",
    "pipelinerl.domains.dispatcher.": "set pipelinerl.domains.multi.generate_multi_rollout (docs/domains.md)",
    "pipelinerl.domains.multidomain.": "set pipelinerl.domains.multi.load_problems (docs/domains.md)",
}
#: Services that grade for built-in tasks.
GRADING_SERVICES = (
    "pipelinerl.domains.math.MathEnvironment",
    "pipelinerl.domains.logic.LogicEnvironment",
    "pipelinerl.domains.ifeval.IFEvalEnvironment",
    "pipelinerl.domains.fn_calling.BFCLEnvironment",
)


#: What TRL, verl and OpenRLHF call our keys, by the ends of the dotted names.
_OTHER_NAMES = {
    "model_path": "model_name_or_path actor_rollout_ref.model.path pretrain model_name",
    "output_dir": "default_local_dir save_path ckpt_path",
    "attempts": "num_generations rollout.n n_samples_per_prompt group_size",
    "max_lag": "staleness_threshold max_staleness",
    "schedule": "async_train",
    "eval_every_n_versions": "eval_steps test_freq eval_interval",
    "train_dataset_names": "dataset_name train_files dataset",
    "test_dataset_names": "val_files eval_dataset",
    "llm.parameters.max_tokens": (
        "max_new_tokens max_completion_length max_response_length generate_max_len response_length"
    ),
    "agent.prompt_max_len": "max_prompt_length prompt_length",
    "finetune.learning_rate": "lr actor_learning_rate",
    "finetune.train_batch_size": (
        "per_device_train_batch_size micro_train_batch_size micro_batch_size "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu"
    ),
    "finetune.gradient_accumulation_passes": (
        "batch_size gradient_accumulation_steps rollout_batch_size data.train_batch_size "
        "ppo_mini_batch_size global_batch_size"
    ),
    "finetune.max_train_steps": "max_steps total_training_steps num_steps total_steps",
    "finetune.max_epochs": "num_train_epochs total_epochs num_episodes num_epochs epochs",
    "finetune.num_warmup_steps": "warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio",
    "finetune.lr_scheduler_type": "lr_scheduler warmup_style",
    "finetune.gradient_clipping_threshold": "max_grad_norm grad_clip max_norm clip_grad",
    "finetune.weight_decay": "l2",
    "finetune.seq_length": "max_length max_seq_length max_seq_len max_len ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "finetune.seq_packing": "packing packing_samples use_dynamic_bsz use_remove_padding",
    "finetune.gradient_checkpointing": "enable_gradient_checkpointing",
    "finetune.save_checkpoint_steps": "save_steps save_freq save_interval",
    "finetune.keep_last_checkpoints": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "finetune.dtype": "bf16 fp16 torch_dtype param_dtype",
    "finetune.attn_implementation": "flash_attn",
    "finetune.lora.enabled": "use_peft",
    "finetune.lora.r": "lora_r lora_rank",
    "finetune.lora.alpha": "lora_alpha",
    "finetune.lora.target_modules": "lora_target_modules",
    "finetune.lora.adapter_path": "lora_adapter_path adapter_name_or_path lora_path",
    "finetune.rl.policy_loss": "loss_mode importance_sampling_level",
    "finetune.rl.aggregation": "loss_type loss_agg_mode",
    "finetune.rl.advantage_estimator": "advantage.estimator adv_estimator",
    "finetune.rl.divide_advantage_by_std": "no_std_norm scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm",
    "finetune.rl.kl_coef": "kl.init_coef kl.use_loss beta kl_loss_coef use_kl_loss init_kl_coef",
    "finetune.rl.reward_minus_kl_coef": "kl_ctrl.kl_coef use_kl_in_reward",
    "finetune.rl.kl_estimator": "kl_loss_type",
    "finetune.rl.epsilon_low": "epsilon eps_clip clip_ratio clip_ratio_low eps_clip_low_high cliprange clip_range",
    "finetune.rl.epsilon_high": "eps_clip_high clip_ratio_high",
    "finetune.rl.dual_clip": "delta clip_ratio_c",
    "finetune.rl.entropy_bonus": "entropy_coeff entropy_coef entropy_loss_coef ent_coef",
    "finetune.rl.gae_lambda": "lam lambd",
    "finetune.rl.value_loss_coef": "vf_coef",
    "finetune.rl.critic_learning_rate": "critic.optim.lr",
    "finetune.rl.importance_correction": "vllm_importance_sampling_correction enable_vllm_is_correction rollout_is",
    "finetune.rl.importance_high": "vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold",
    "finetune.rl.overlong_filtering": "mask_truncated_completions",
    "finetune.rl.overlong_buffer_tokens": "overlong_buffer.len overlong_buffer_len",
    "finetune.rl.filter_zero_advantage_groups": (
        "dynamic_filtering_enable dynamic_filtering filter_groups.enable dynamic_sampling"
    ),
    "finetune.rl.filter_reward_low": "dynamic_filtering_reward_range",
    "rewards.components": "reward_weights",
    "actor.agent_func_path": "agent_func",
    "actor.rollout_policy": "reward_funcs custom_reward_function remote_url remote_rm_url",
    "eval": "num_generations_eval val_kwargs.n eval.n_samples_per_prompt eval_n_samples_per_prompt",
    "backend.config": "zero_stage",
    "world.num_actor_llms": "num_engines vllm_num_engines",
    "world.placement": "colocate_all vllm_mode colocate_all_models hybrid_engine",
    "world.sleep_level": "vllm_enable_sleep vllm_enable_sleep_mode",
    "world.offload_optimizer": "optimizer_offload adam_offload",
    "vllm_config.vllm_kwargs.tensor-parallel-size": (
        "vllm.tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size"
    ),
    "vllm_config.vllm_kwargs.gpu-memory-utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "vllm_config.vllm_kwargs.max_model_len": "vllm_max_model_length max_model_len",
    "wandb.mode": "report_to use_wandb",
    "wandb.wandb_name": "run_name experiment_name wandb_run_name",
    "wandb.wandb_project_name": "wandb.project project_name wandb_project",
}
SYNONYMS: dict[str, str] = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}


def synonym_of(key: str) -> str | None:
    """Return our name of a key of TRL, verl or OpenRLHF, going by its last parts; None: they have none of that name."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((SYNONYMS[end] for end in ends if end in SYNONYMS), None)


def fate_of(key: str, value: object) -> str | None:
    """Return one sentence on what became of a key of PipelineRL (or of a key below it) with this value; None: it never
    was one."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in REWRITTEN:
            return f"Set {REWRITTEN[name]}."
        if name in VALUES:
            new = VALUES[name].of(value) if name == key else VALUES[name].otherwise
            if isinstance(new, tuple):
                return f"Set {new[0]}={new[1]}."
            if new is None:
                return "Leave it out: it asks for nothing."
            if new:
                return f"It is not supported: {new}."
        if name in RENAMED:
            return f"It is {RENAMED[name]} now."
        if name in DROPPED:
            return f"It is gone: {DROPPED[name]}."
    return None
