"""Rules between sections, which the types cannot state.

Each rule yields a `ConfigError` for what it refuses. What needs the machine
(GPUs, ports, the model's files) is checked before the start, in `run/preflight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pipelinerl.config.agent import AGENT_ROLLOUT
from pipelinerl.config.algorithm import GeometricMaskCorrection, IcepopCorrection
from pipelinerl.config.faults import raise_faults
from pipelinerl.config.finetune import LARGEST_ADAPTER_RANK
from pipelinerl.config.resources import GPU_LISTS, FSDPSettings, RedisStreams
from pipelinerl.config.run import ConventionalSchedule, RunConfig
from pipelinerl.config.stages import READING_MODES, STAGE_KINDS, has_stage
from pipelinerl.errors import ConfigError

#: Some of the shipped experiments; `--help` lists all.
EXPERIMENTS = ("math", "guessing", "quickstart")
_CPU_BLOCK = 32
_REDIS_SCHEMES = ("redis", "rediss", "unix")

Faults = Iterator[ConfigError]


def validate(config: RunConfig) -> None:
    """Check every rule.

    Raises:
        ConfigError: with one line for each broken rule.
    """
    raise_faults([fault for rule in _RULES for fault in rule(config)])


def missing_task(config: RunConfig) -> ConfigError | None:
    """What a run that makes rollouts lacks: a rollout function, or a loader of its problems.

    No rule: files that others start from have no task.
    """
    if not has_stage(config, "actor"):
        return None
    for key, value, function in (
        ("actor.rollout_policy", config.actor.rollout_policy, "generate_rollout"),
        ("dataset_loader", config.dataset_loader, "load_problems"),
    ):
        if value is None:
            return ConfigError(
                key,
                value,
                f"the dotted path of a {function}: there is no task",
                f"Start an experiment (--config-name {'|'.join(EXPERIMENTS)}, --help lists all), or set "
                "actor.rollout_policy and dataset_loader to functions of yours (docs/domains.md).",
            )
    return None


def _groups(config: RunConfig) -> Faults:
    rl = config.finetune.rl
    if config.attempts < 2 and rl.uses_group:
        yield ConfigError(
            "attempts",
            config.attempts,
            f"at least 2 with finetune.rl.advantage_estimator={rl.advantage_estimator}, which compares rollouts of one "
            "problem",
            "Set attempts=8, or finetune.rl.advantage_estimator=reinforce (REINFORCE++ with "
            "finetune.rl.normalize_reward=true).",
        )
    low, high = rl.filter_reward_low, rl.filter_reward_high
    if low is not None and high is not None and low >= high:
        yield ConfigError(
            "finetune.rl.filter_reward_low", low, f"less than finetune.rl.filter_reward_high={high}", "Swap them."
        )
    if config.attempts < 2 and (low is not None or high is not None):
        yield ConfigError(
            "attempts",
            config.attempts,
            "at least 2 with finetune.rl.filter_reward_low or filter_reward_high, which look at the mean of a group",
            "Set attempts=8, or both bounds to null.",
        )


def _reference(config: RunConfig) -> Faults:
    rl, temperature = config.finetune.rl, config.sampling_temperature
    if rl.reference == "servers" and rl.needs_reference and not config.has_reference_pool:
        yield ConfigError(
            "finetune.rl.reference",
            "servers",
            "auto or local in a world without servers of the reference model",
            "Leave it at auto, or set world.preprocessor_fraction=1 (or world.num_preprocessor_llms=1).",
        )
    if temperature != 1 and rl.needs_reference and not config.uses_local_reference(config.has_reference_pool):
        yield ConfigError(
            "llm.parameters.temperature",
            temperature,
            "1.0 with log-probs of reference servers, which ignore the temperature",
            "Set it to 1.0, or finetune.rl.reference=local.",
        )


def _loss(config: RunConfig) -> Faults:
    rl, longest = config.finetune.rl, config.llm.parameters.max_tokens
    if rl.aggregation == "constant_length" and rl.constant_length_tokens is None:
        yield ConfigError(
            "finetune.rl.constant_length_tokens",
            None,
            "a number of tokens with finetune.rl.aggregation=constant_length",
            f"Set it to llm.parameters.max_tokens, which is {longest}.",
        )
    if rl.overlong_buffer_tokens and rl.overlong_limit_tokens is None:
        yield ConfigError(
            "finetune.rl.overlong_limit_tokens",
            None,
            "a number of tokens with finetune.rl.overlong_buffer_tokens above 0",
            f"Set it to llm.parameters.max_tokens, which is {longest}, or to the sum over turns if there are several.",
        )
    elif rl.overlong_limit_tokens is not None and rl.overlong_buffer_tokens > rl.overlong_limit_tokens:
        yield ConfigError(
            "finetune.rl.overlong_buffer_tokens",
            rl.overlong_buffer_tokens,
            f"at most finetune.rl.overlong_limit_tokens={rl.overlong_limit_tokens}",
            "Lower it.",
        )
    if rl.target_entropy is not None and rl.final_entropy_bonus is not None:
        yield ConfigError(
            "finetune.rl.final_entropy_bonus",
            rl.final_entropy_bonus,
            f"null with finetune.rl.target_entropy={rl.target_entropy}, which moves the bonus",
            "Remove one of the two.",
        )
    bounds = rl.correction
    if not isinstance(bounds, IcepopCorrection | GeometricMaskCorrection):
        return
    if bounds.importance_low >= bounds.importance_high:
        yield ConfigError(
            "finetune.rl.importance_low",
            bounds.importance_low,
            f"less than finetune.rl.importance_high={bounds.importance_high}",
            "Swap them.",
        )


def _updates(config: RunConfig) -> Faults:
    """Weight updates and lag fit the schedule."""
    interval, allowed = config.finetune.weight_update_interval, config.finetune.max_version_lag
    key = "finetune.weight_update_interval"
    if isinstance(config.pacing, ConventionalSchedule):
        oldest = config.pacing.steps_per_generation - 1
        if interval > 1:
            yield ConfigError(
                key,
                interval,
                "1 with schedule=conventional, which sends weights after each round",
                f"Set steps_per_generation={interval} instead.",
            )
        if allowed is not None and allowed < oldest:
            yield ConfigError(
                "finetune.max_version_lag",
                allowed,
                f"at least steps_per_generation - 1 = {oldest} with schedule=conventional",
                "Leave it out: the lag is bounded by steps_per_generation.",
            )
        return
    if interval > 1 and config.max_lag == 0:
        yield ConfigError(
            key,
            interval,
            "1 with max_lag=0, which trains only on the newest policy",
            "Raise max_lag, or update after every step.",
        )
    if allowed is not None and interval - 1 > allowed:
        yield ConfigError(
            "finetune.max_version_lag",
            allowed,
            f"at least {key} - 1 = {interval - 1}; below, every sample would be stale",
            "Raise it, or update more often.",
        )


def _trainer(config: RunConfig) -> Faults:
    finetune, backend = config.finetune, config.backend
    if finetune.dtype == "tf32" and isinstance(backend, FSDPSettings) and backend.param_dtype != "fp32":
        yield ConfigError(
            "backend.param_dtype",
            backend.param_dtype,
            "fp32 with finetune.dtype=tf32, which multiplies fp32 weights",
            "Set backend.param_dtype=fp32, or finetune.dtype=bf16.",
        )
    if finetune.dtype == "tf32" and finetune.attn_implementation in ("flex_attention", "flash_attention_2"):
        yield ConfigError(
            "finetune.attn_implementation",
            finetune.attn_implementation,
            "auto, sdpa or eager with finetune.dtype=tf32: this one is compiled, or for half precision",
            "Set finetune.attn_implementation=auto.",
        )
    if finetune.interrupt_train_steps == 0 or finetune.interrupt_train_steps > finetune.max_train_steps:
        yield ConfigError(
            "finetune.interrupt_train_steps",
            finetune.interrupt_train_steps,
            f"-1 (off), or from 1 to finetune.max_train_steps={finetune.max_train_steps}",
            "Raise finetune.max_train_steps, or leave it at -1.",
        )
    if finetune.keep_best is not None and not config.test_dataset_names:
        yield ConfigError(
            "finetune.keep_best",
            finetune.keep_best,
            "null without held-out problems, as nothing is evaluated",
            "Name some in test_dataset_names, or leave it out.",
        )


def _adapter(config: RunConfig) -> Faults:
    """With `finetune.lora.sync=adapter` the servers hold the frozen model, and all that is trained are A and B."""
    lora, vllm = config.finetune.lora, config.vllm_config
    if lora.sync == "adapter" and not lora.enabled:
        yield ConfigError(
            "finetune.lora.sync",
            "adapter",
            "merged with finetune.lora.enabled=false: there is no adapter, all weights are trained",
            "Add finetune.lora.enabled=true, or remove the key.",
        )
    if not lora.sends_adapter:
        return
    merged, condition = "or set finetune.lora.sync=merged.", "with finetune.lora.sync=adapter"
    if lora.bias != "none":
        yield ConfigError(
            "finetune.lora.bias",
            lora.bias,
            f"none {condition}: servers accept no biases with an adapter",
            f"Leave biases untrained, {merged}",
        )
    if lora.r > LARGEST_ADAPTER_RANK:
        yield ConfigError(
            "finetune.lora.r",
            lora.r,
            f"at most {LARGEST_ADAPTER_RANK} {condition}: vLLM has no room for more",
            f"Lower it, {merged}",
        )
    key, quantization = vllm.option("quantization")
    if vllm.quantization is not None:
        key, quantization = "vllm_config.quantization", vllm.quantization
    if quantization is not None:
        expected = f"no quantization {condition}: the trainer computes with the model as it is"
        yield ConfigError(key, quantization, expected, f"Remove it, {merged}")
    key, load_format = vllm.option("load-format")
    if load_format == "dummy":
        expected = f"servers that load their weights {condition}: updates do not bring the model"
        yield ConfigError(key, load_format, expected, f"Remove it, {merged}")
    if config.world.colocated:
        yield ConfigError(
            "world.placement",
            "colocated",
            f"disaggregated {condition}: sleeping servers may drop their weights, and updates do not bring them back",
            f"Place servers and trainer apart, {merged}",
        )
    if (vllm.number("pipeline-parallel-size") or 1) > 1:
        key, size = vllm.option("pipeline-parallel-size")
        expected = f"1 {condition}: each worker checks that the whole adapter has its place"
        yield ConfigError(key, size, expected, f"Use tensor-parallel-size, {merged}")


def _lengths(config: RunConfig) -> Faults:
    """Prompt and output fit into the context, and the context into a micro-batch."""
    vllm = config.vllm_config
    key, value = vllm.option("max-model-len")
    context = vllm.number("max-model-len")
    if value is not None and (context is None or context < 2):
        yield ConfigError(key, value, "a number of tokens", "Write for instance max_model_len: 4096.")
    if context is not None and config.finetune.seq_length < context:
        yield ConfigError(
            "finetune.seq_length",
            config.finetune.seq_length,
            f"at least {key}={context}; longer samples could not be trained",
            f"Set finetune.seq_length={context}, or lower max_model_len (and max_tokens).",
        )
    for section, parameters in (("llm", config.llm.parameters), ("test_llm", config.test_llm.parameters)):
        if context is not None and parameters.max_tokens >= context:
            yield ConfigError(
                f"{section}.parameters.max_tokens",
                parameters.max_tokens,
                f"less than {key}={context}, so that a prompt fits too",
                "Lower it, or raise max_model_len and finetune.seq_length.",
            )
            break
        if parameters.min_tokens > parameters.max_tokens:
            yield ConfigError(
                f"{section}.parameters.min_tokens",
                parameters.min_tokens,
                f"at most {section}.parameters.max_tokens={parameters.max_tokens}",
                "Lower it.",
            )
    key, value = vllm.option("block-size")
    size = vllm.number("block-size")
    if config.world.device == "cpu" and size is not None and (size == 0 or size % _CPU_BLOCK):
        yield ConfigError(key, value, f"a multiple of {_CPU_BLOCK} on a CPU", f"Set it to {_CPU_BLOCK}.")


def _shares(config: RunConfig) -> Faults:
    """Somebody samples and somebody trains, unless the mode says otherwise."""
    world = config.world
    stages = STAGE_KINDS[config.debug.mode]
    for kind, key, share, count in (
        ("actor_llm", "world.actor_fraction", world.actor_fraction, world.num_actor_llms),
        ("finetune", "world.finetune_fraction", world.finetune_fraction, world.num_finetune_ranks),
    ):
        if kind in stages and share <= 0 and count is None:
            work = "a server samples" if kind == "actor_llm" else "a trainer runs"
            yield ConfigError(key, share, f"more than 0, so that {work}", "Set it to 1 or more.")


def _shared_devices(config: RunConfig) -> Faults:
    world, colocated = config.world, config.world.colocated
    if colocated is None:
        return
    if config.schedule != "conventional":
        yield ConfigError(
            "schedule",
            config.schedule,
            "conventional with world.placement=colocated: servers and trainer alternate",
            "Add schedule=conventional: steps_per_generation=1 is on-policy, 2 is at most one version old.",
        )
    if colocated.offload_optimizer and config.backend.type != "plain":
        yield ConfigError(
            "world.offload_optimizer",
            True,
            f"false with backend={config.backend.type}",
            "Use backend=plain, or a DeepSpeed configuration with offload.",
        )
    if world.num_preprocessor_llms or (world.num_preprocessor_llms is None and world.preprocessor_fraction > 0):
        yield ConfigError(
            "world.preprocessor_fraction",
            world.preprocessor_fraction,
            "0 with world.placement=colocated: the reference model is next to the trainer",
            "Set it to 0 and leave finetune.rl.reference at auto.",
        )


def _gpu_lists(config: RunConfig) -> Faults:
    """Lists of GPUs name those of every pool."""
    lists = {key: getattr(config.world, key) for key in GPU_LISTS}
    if all(value is None for value in lists.values()):
        return
    stages = STAGE_KINDS[config.debug.mode]
    wanted = {
        "actor_gpus": "actor_llm" in stages,
        "preprocessor_gpus": config.has_reference_pool,
        "finetune_gpus": "finetune" in stages,
    }
    for key, value in lists.items():
        if value is None:
            if wanted[key]:
                others = ", ".join(f"world.{other}" for other, given in lists.items() if given is not None)
                example = "[1]" if key == "finetune_gpus" else "[[0]]"
                yield ConfigError(
                    f"world.{key}", None, f"a list of GPUs, as in {others}", f"Set for instance world.{key}={example}."
                )
        elif any(len(set(gpus)) != len(gpus) or not gpus for gpus in ([value] if key == "finetune_gpus" else value)):
            yield ConfigError(
                f"world.{key}",
                value,
                "each GPU once for one server, and once for all ranks together (NCCL refuses two ranks on one)",
                "Remove what is there twice.",
            )


def _run(config: RunConfig) -> Faults:
    part, supervise, streams = config.train_subset, config.supervise, config.streams
    if part is not None and (set(part) != {"begin", "end"} or not 0 <= part["begin"] < part["end"]):
        yield ConfigError(
            "train_subset",
            part,
            "{begin: B, end: E} with 0 <= B < E",
            "Write for instance train_subset={begin:0,end:100}.",
        )
    if supervise.heartbeat_timeout_s <= supervise.heartbeat_interval_s:
        yield ConfigError(
            "supervise.heartbeat_timeout_s",
            supervise.heartbeat_timeout_s,
            f"more than supervise.heartbeat_interval_s={supervise.heartbeat_interval_s}",
            "Use at least ten intervals.",
        )
    if isinstance(streams, RedisStreams) and streams.url and urlsplit(streams.url).scheme not in _REDIS_SCHEMES:
        yield ConfigError(
            "streams.url", streams.url, "redis://HOST:PORT/DB", "Leave it out to have the launcher start a server."
        )


def _stage_alone(config: RunConfig) -> Faults:
    """A run reads what it wrote; a stage alone reads what another run wrote."""
    source, mode = config.debug.streams_from, config.debug.mode
    if mode not in READING_MODES:
        if source is not None:
            yield ConfigError(
                "debug.streams_from",
                source,
                f"null with debug.mode={mode!r}: a run reads its own streams",
                "Leave it out; to continue that run, give its folder as output_dir.",
            )
    elif source is None:
        yield ConfigError(
            "debug.streams_from", None, f"the output_dir of another run with debug.mode={mode}", "Name a recorded run."
        )
    elif Path(source).absolute() == Path(config.output_dir).absolute():
        yield ConfigError(
            "debug.streams_from", source, "another run than output_dir", "Choose another output_dir for this stage."
        )


def _agent_function(config: RunConfig) -> Faults:
    path = config.actor.agent_func_path
    if path is None:
        return
    if config.actor.rollout_policy != AGENT_ROLLOUT:
        yield ConfigError(
            "actor.rollout_policy",
            config.actor.rollout_policy,
            f"null with actor.agent_func_path={path}",
            "Set one of the two; --config-name agent starts without a task.",
        )
    if config.dataset_loader is None:
        yield ConfigError(
            "agent.prompt_data",
            config.agent.prompt_data,
            "a JSONL file or the name of a Hugging Face dataset, for actor.agent_func_path",
            "Set it, and agent.input_key to the column of the prompts.",
        )


_RULES = (
    *(_groups, _reference, _loss, _updates, _trainer, _adapter, _lengths, _shares, _shared_devices, _gpu_lists, _run),
    *(_stage_alone, _agent_function),
)
