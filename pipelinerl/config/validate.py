"""Rules between sections, which the types cannot state.

A rule yields key, what is expected, and what to do. What needs the machine (GPUs, ports, the model's files) is checked
before the start, in `run/preflight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pipelinerl.config.agent import AGENT_ROLLOUT
from pipelinerl.config.algorithm import GeometricMaskCorrection, IcepopCorrection
from pipelinerl.config.faults import raise_faults
from pipelinerl.config.keys import value_at
from pipelinerl.config.load import ADAPTER_START, merge_command
from pipelinerl.config.resources import GPU_LISTS, READING_MODES, STAGE_KINDS, FSDPSettings, RedisStreams
from pipelinerl.config.run import ConventionalSchedule, RunConfig
from pipelinerl.errors import ConfigError

#: Some of the shipped experiments; `--help` lists all.
EXPERIMENTS = ("math", "guessing", "quickstart")
_CPU_BLOCK = 32
#: Arguments of a chat template that the code that renders a prompt decides on.
_TEMPLATE_TAKEN = {
    *("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
}

Faults = Iterator[tuple[str, str, str]]


def validate(config: RunConfig) -> None:
    """Check every rule.

    Raises:
        ConfigError: with one line for each broken rule.
    """
    data = config.model_dump()
    found = [fault for rule in _RULES for fault in rule(config)]
    raise_faults([ConfigError(key, value_at(data, key), expected, next_step) for key, expected, next_step in found])


def missing_task(config: RunConfig) -> ConfigError | None:
    """What a run that makes rollouts lacks: a rollout function, or a loader of its problems.

    No rule: files that others start from have no task.
    """
    functions = {"actor.rollout_policy": config.actor.rollout_policy, "dataset_loader": config.dataset_loader}
    missing = [key for key, path in functions.items() if path is None]
    if not missing or not config.has_stage("actor"):
        return None
    next_step = (
        f"Start an experiment (--config-name {'|'.join(EXPERIMENTS)}, --help lists all), or set actor.rollout_policy "
        "and dataset_loader to functions of yours (docs/domains.md)."
    )
    return ConfigError(missing[0], None, "the dotted path of a function: there is no task", next_step)


def _groups(config: RunConfig) -> Faults:
    rl = config.finetune.rl
    low, high = rl.filter_reward_low, rl.filter_reward_high
    if config.attempts < 2 and rl.uses_group:
        expected = f"at least 2 with finetune.rl.advantage_estimator={rl.advantage_estimator}"
        yield "attempts", expected, "Set attempts=8, or finetune.rl.advantage_estimator=reinforce."
    if config.attempts < 2 and (low is not None or high is not None):
        expected = "at least 2 with finetune.rl.filter_reward_low or filter_reward_high"
        yield "attempts", expected, "Set attempts=8, or both bounds to null."
    if low is not None and high is not None and low >= high:
        yield "finetune.rl.filter_reward_low", f"less than finetune.rl.filter_reward_high={high}", "Swap them."


def _reference(config: RunConfig) -> Faults:
    rl = config.finetune.rl
    if rl.reference == "servers" and rl.needs_reference and not config.has_reference_pool:
        expected = "auto or local in a world without servers of the reference model"
        yield "finetune.rl.reference", expected, "Leave it at auto, or set world.preprocessor_fraction=1."
    local = config.uses_local_reference(config.has_reference_pool)
    if config.sampling_temperature != 1 and rl.needs_reference and not local:
        expected = "1.0 with log-probs of reference servers, which ignore the temperature"
        yield "llm.parameters.temperature", expected, "Set it to 1.0, or finetune.rl.reference=local."


def _loss(config: RunConfig) -> Faults:
    rl, bounds = config.finetune.rl, config.finetune.rl.correction
    longest = f"Set it to llm.parameters.max_tokens={config.llm.parameters.max_tokens}"
    buffer, limit = rl.overlong_buffer_tokens, rl.overlong_limit_tokens
    if rl.aggregation == "constant_length" and rl.constant_length_tokens is None:
        expected = "a number of tokens with finetune.rl.aggregation=constant_length"
        yield "finetune.rl.constant_length_tokens", expected, f"{longest}."
    if buffer and limit is None:
        expected = "a number of tokens with finetune.rl.overlong_buffer_tokens above 0"
        yield "finetune.rl.overlong_limit_tokens", expected, f"{longest}, or to the sum over turns."
    if limit is not None and buffer > limit:
        yield "finetune.rl.overlong_buffer_tokens", f"at most finetune.rl.overlong_limit_tokens={limit}", "Lower it."
    if rl.target_entropy is not None and rl.final_entropy_bonus is not None:
        yield "finetune.rl.final_entropy_bonus", "null with finetune.rl.target_entropy", "Remove one of the two."
    if isinstance(bounds, IcepopCorrection | GeometricMaskCorrection) and (
        bounds.importance_low >= bounds.importance_high
    ):
        expected = f"less than finetune.rl.importance_high={bounds.importance_high}"
        yield "finetune.rl.importance_low", expected, "Swap them."


def _updates(config: RunConfig) -> Faults:
    """Weight updates and lag fit the schedule."""
    interval, allowed = config.finetune.weight_update_interval, config.finetune.max_version_lag
    key, lag_key = "finetune.weight_update_interval", "finetune.max_version_lag"
    if isinstance(config.pacing, ConventionalSchedule):
        oldest = config.pacing.steps_per_generation - 1
        if interval > 1:
            expected = "1 with schedule=conventional, which sends weights after each round"
            yield key, expected, f"Set steps_per_generation={interval} instead."
        if allowed is not None and allowed < oldest:
            yield lag_key, f"at least steps_per_generation - 1 = {oldest}", "Set it to null: the rounds bound the lag."
        return
    if interval > 1 and config.max_lag == 0:
        yield key, "1 with max_lag=0, which trains only on the newest policy", "Raise max_lag."
    if allowed is not None and interval - 1 > allowed:
        yield lag_key, f"at least {key} - 1 = {interval - 1}; below, every sample would be stale", "Raise it."


def _trainer(config: RunConfig) -> Faults:
    finetune, backend = config.finetune, config.backend
    if finetune.dtype == "tf32" and isinstance(backend, FSDPSettings) and backend.param_dtype != "fp32":
        expected = "fp32 with finetune.dtype=tf32, which multiplies fp32 weights"
        yield "backend.param_dtype", expected, "Set backend.param_dtype=fp32, or finetune.dtype=bf16."
    if finetune.dtype == "tf32" and finetune.attn_implementation in ("flex_attention", "flash_attention_2"):
        expected = "auto, segments, sdpa or eager with finetune.dtype=tf32"
        yield "finetune.attn_implementation", expected, "Set finetune.attn_implementation=auto."
    if finetune.interrupt_train_steps == 0 or finetune.interrupt_train_steps > finetune.max_train_steps:
        expected = f"-1 (off), or from 1 to finetune.max_train_steps={finetune.max_train_steps}"
        yield "finetune.interrupt_train_steps", expected, "Leave it at -1, or raise finetune.max_train_steps."
    if finetune.stop_at_success is not None and not (config.is_evaluated and config.eval_every_n_versions):
        expected = "null without evaluations in the course of training"
        yield "finetune.stop_at_success", expected, "Name test_dataset_names, and set eval_every_n_versions above 0."
    if finetune.keep_best is not None and not config.is_evaluated:
        expected = "null without held-out problems, as nothing is evaluated"
        yield "finetune.keep_best", expected, "Name some in test_dataset_names."


def _adapter(config: RunConfig) -> Faults:
    """With `finetune.lora.sync=adapter` the servers hold the frozen model, and all that is trained are A and B."""
    lora, vllm = config.finetune.lora, config.vllm_config
    if lora.sync == "adapter" and not lora.enabled:
        expected = "merged with finetune.lora.enabled=false: all weights are trained"
        yield "finetune.lora.sync", expected, "Set finetune.lora.enabled=true, or remove the key."
    if lora.adapter_path is not None and not (lora.enabled and not config.finetune.rl.needs_reference):
        lacks = "with a reference model: servers and trainer would take the model without the adapter for it"
        reason = lacks if lora.enabled else "with finetune.lora.enabled=false: all weights of model_path are trained"
        merge = f"start from a merged model: {merge_command(config.model_path, lora.adapter_path)}"
        remedy = f"Leave finetune.rl.kl_coef and finetune.rl.reward_minus_kl_coef at 0, or {merge}"
        yield ADAPTER_START, f"null {reason}", remedy if lora.enabled else f"Set finetune.lora.enabled=true, or {merge}"
    if not lora.sends_adapter:
        return
    condition, merged = "with finetune.lora.sync=adapter", "or set finetune.lora.sync=merged."
    if lora.bias != "none":
        expected = f"none {condition}: servers accept no biases with an adapter"
        yield "finetune.lora.bias", expected, f"Leave biases untrained, {merged}"
    key, quantization = vllm.option("quantization")
    if quantization is not None:
        yield key, f"no quantization {condition}: the trainer has the model as it is", f"Remove it, {merged}"
    key, load_format = vllm.option("load-format")
    if load_format == "dummy":
        expected = f"servers that load their weights {condition}: updates do not bring the model"
        yield key, expected, f"Remove it, {merged}"
    if config.world.colocated:
        expected = f"disaggregated {condition}: sleeping servers may drop the model, and updates do not bring it back"
        yield "world.placement", expected, f"Place servers and trainer apart, {merged}"
    if (vllm.number("pipeline-parallel-size") or 1) > 1:
        key, _ = vllm.option("pipeline-parallel-size")
        expected = f"1 {condition}: each worker checks that the whole adapter has its place"
        yield key, expected, f"Use tensor-parallel-size, {merged}"


def _lengths(config: RunConfig) -> Faults:
    """Prompt and output fit into the context, and the context into a micro-batch."""
    vllm = config.vllm_config
    key, value = vllm.option("max-model-len")
    context = vllm.number("max-model-len")
    if value is not None and (context is None or context < 2):
        yield key, "a number of tokens", "Write for instance max_model_len: 4096."
    if context is not None and config.finetune.seq_length < context:
        expected = f"at least {key}={context}; longer samples could not be trained"
        yield "finetune.seq_length", expected, f"Set finetune.seq_length={context}, or lower max_model_len."
    for section, parameters in (("llm", config.llm.parameters), ("test_llm", config.test_llm.parameters)):
        if context is not None and parameters.max_tokens >= context:
            expected = f"less than {key}={context}, so that a prompt fits too"
            yield f"{section}.parameters.max_tokens", expected, "Lower it, or raise max_model_len."
            break  # evaluation follows
        if parameters.min_tokens > parameters.max_tokens:
            expected = f"at most {section}.parameters.max_tokens={parameters.max_tokens}"
            yield f"{section}.parameters.min_tokens", expected, "Lower it."
    key, _ = vllm.option("max-model-len")
    for index, own in enumerate(config.eval):
        if context is not None and own.max_tokens is not None and own.max_tokens >= context:
            yield f"eval.{index}.max_tokens", f"less than {key}={context}, so that a prompt fits too", "Lower it."
    key, _ = vllm.option("block-size")
    size = vllm.number("block-size")
    if config.world.device == "cpu" and size is not None and (size == 0 or size % _CPU_BLOCK):
        yield key, f"a multiple of {_CPU_BLOCK} on a CPU", f"Set it to {_CPU_BLOCK}."


def _evaluation(config: RunConfig) -> Faults:
    names = [repr(each.name) for each in config.eval]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield "eval", f"each set once ({', '.join(twice)} is there twice)", "Leave one out."
    if config.debug.mode == "evaluation" and not config.is_evaluated:
        yield "test_dataset_names", "names of held-out sets: they are all that is evaluated", "Name at least one."


def _chat_template(config: RunConfig) -> Faults:
    taken = sorted(_TEMPLATE_TAKEN & config.llm.chat_template_kwargs.keys())
    if taken:
        expected = f"arguments of the model's own; {', '.join(taken)} is set by each prompt"
        yield "llm.chat_template_kwargs", expected, "Leave it out."


def _world(config: RunConfig) -> Faults:
    """Somebody samples and somebody trains, unless the mode says otherwise."""
    world, stages = config.world, STAGE_KINDS[config.debug.mode]
    if "actor_llm" in stages and world.actor_fraction <= 0 and world.num_actor_llms is None:
        yield "world.actor_fraction", "more than 0, so that a server samples", "Set it to 1 or more."
    if "finetune" in stages and world.finetune_fraction <= 0 and world.num_finetune_ranks is None:
        yield "world.finetune_fraction", "more than 0, so that a trainer runs", "Set it to 1 or more."
    # Without GPUs, or where lists place the servers, it does nothing.
    per_gpu = "auto" if world.device == "cpu" or world.actor_gpus else world.servers_per_gpu
    count = world.num_actor_llms
    if per_gpu != "auto" and count is not None and count < per_gpu:
        expected = f"at most world.num_actor_llms={count}, the number of all servers"
        yield "world.servers_per_gpu", expected, "Lower it, or set world.num_actor_llms=null."
    if world.colocated is None:
        return
    if config.schedule != "conventional":
        expected = "conventional with world.placement=colocated: servers and trainer alternate"
        yield "schedule", expected, "Set schedule=conventional; steps_per_generation=1 is on-policy."
    if world.colocated.offload_optimizer and config.backend.type != "plain":
        yield "world.offload_optimizer", f"false with backend={config.backend.type}", "Set backend=plain."
    if config.has_reference_pool:
        expected = "0 with world.placement=colocated: the reference model is next to the trainer"
        yield "world.preprocessor_fraction", expected, "Set it to 0 and leave finetune.rl.reference at auto."


def _gpu_lists(config: RunConfig) -> Faults:
    """Lists of GPUs name those of every pool."""
    stages = STAGE_KINDS[config.debug.mode]
    wanted = {
        "actor_gpus": "actor_llm" in stages,
        "preprocessor_gpus": config.has_reference_pool,
        "finetune_gpus": "finetune" in stages,
    }
    lists = {key: getattr(config.world, key) for key in GPU_LISTS}
    given = ", ".join(f"world.{key}" for key, value in lists.items() if value is not None)
    for key, value in lists.items():
        flat = key == "finetune_gpus"
        if value is None:
            if given and wanted[key]:
                next_step = f"Set for instance world.{key}={'[1]' if flat else '[[0]]'}."
                yield f"world.{key}", f"a list of GPUs, as in {given}", next_step
        elif any(len(set(gpus)) != len(gpus) or not gpus for gpus in ([value] if flat else value)):
            expected = "each GPU once for one server, and once for all ranks together (NCCL refuses two ranks on one)"
            yield f"world.{key}", expected, "Remove what is there twice."


def _run(config: RunConfig) -> Faults:
    part, supervise, streams = config.train_subset, config.supervise, config.streams
    if part is not None and (set(part) != {"begin", "end"} or not 0 <= part["begin"] < part["end"]):
        expected = "{begin: B, end: E} with 0 <= B < E"
        yield "train_subset", expected, "Write for instance train_subset={begin:0,end:100}."
    if supervise.heartbeat_timeout_s <= supervise.heartbeat_interval_s:
        expected = f"more than supervise.heartbeat_interval_s={supervise.heartbeat_interval_s}"
        yield "supervise.heartbeat_timeout_s", expected, "Use at least ten intervals."
    url = streams.url if isinstance(streams, RedisStreams) else None
    if url and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        yield "streams.url", "redis://HOST:PORT/DB", "Leave it out to have the launcher start a server."


def _stage_alone(config: RunConfig) -> Faults:
    """A run reads what it wrote; a stage alone reads what another run wrote."""
    key, source, mode = "debug.streams_from", config.debug.streams_from, config.debug.mode
    if mode not in READING_MODES:
        if source is not None:
            next_step = "Leave it out; to continue that run, give its folder as output_dir."
            yield key, f"null with debug.mode={mode!r}: a run reads its own streams", next_step
    elif source is None:
        yield key, f"the output_dir of another run with debug.mode={mode}", "Name a recorded run."
    elif Path(source).absolute() == Path(config.output_dir).absolute():
        yield key, "another run than output_dir", "Choose another output_dir for this stage."


def _agent_function(config: RunConfig) -> Faults:
    path = config.actor.agent_func_path
    if path is not None and config.actor.rollout_policy != AGENT_ROLLOUT:
        next_step = "Set one of the two; --config-name agent starts without a task."
        yield "actor.rollout_policy", f"null with actor.agent_func_path={path}", next_step
    if path is not None and config.dataset_loader is None:
        expected = "a JSONL file or the name of a Hugging Face dataset, for actor.agent_func_path"
        yield "agent.prompt_data", expected, "Set it, and agent.input_key to the column of the prompts."


_RULES = (
    *(_groups, _reference, _loss, _updates, _trainer, _adapter, _lengths, _evaluation, _chat_template, _world),
    *(_gpu_lists, _run, _stage_alone, _agent_function),
)
