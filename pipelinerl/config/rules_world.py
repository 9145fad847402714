"""Rules of the split, the streams, the data and the supervisor. Called through `rules.validate`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pipelinerl.config.agent import AGENT_ROLLOUT
from pipelinerl.config.run import RunConfig
from pipelinerl.config.sections import GPU_LISTS
from pipelinerl.config.stages import READING_MODES, STAGE_KINDS
from pipelinerl.errors import ConfigError

_REDIS_SCHEMES = ("redis", "rediss", "unix")
_WITHOUT_ACTOR = ("preprocessor", "finetune", "finetune+preprocessor")
_WITHOUT_TRAINER = ("actor", "preprocessor")


def shares(config: RunConfig) -> ConfigError | None:
    """Somebody gets a part of the machine."""
    world = config.world
    counts = (world.num_actor_llms, world.num_preprocessor_llms, world.num_finetune_ranks)
    total = world.actor_fraction + world.preprocessor_fraction + world.finetune_fraction
    if total <= 0 and not any(counts):
        return ConfigError(
            "world.actor_fraction + world.preprocessor_fraction + world.finetune_fraction",
            total,
            "more than 0",
            "Set for instance world.actor_fraction=4 world.finetune_fraction=4.",
        )
    return None


def actor_share(config: RunConfig) -> ConfigError | None:
    """A run samples."""
    world = config.world
    if config.debug.mode not in _WITHOUT_ACTOR and world.actor_fraction <= 0 and world.num_actor_llms is None:
        return ConfigError(
            "world.actor_fraction",
            world.actor_fraction,
            "more than 0, so that a server samples",
            "Set it to 1 or more.",
        )
    return None


def trainer_share(config: RunConfig) -> ConfigError | None:
    """A run trains."""
    world = config.world
    if config.debug.mode not in _WITHOUT_TRAINER and world.finetune_fraction <= 0 and world.num_finetune_ranks is None:
        return ConfigError(
            "world.finetune_fraction",
            world.finetune_fraction,
            "more than 0, so that a trainer runs",
            "Set it to 1 or more.",
        )
    return None


def shared_devices(config: RunConfig) -> ConfigError | None:
    """Who shares devices takes turns, leaves room, and can do what is asked for meanwhile."""
    world = config.world
    if world.placement != "colocated":
        if world.offload_optimizer:
            return ConfigError(
                "world.offload_optimizer", True, "false with world.placement=disaggregated", "Remove the key."
            )
        return None
    if config.schedule != "conventional":
        return ConfigError(
            "schedule",
            config.schedule,
            "conventional with world.placement=colocated: servers and trainer take turns",
            "Add schedule=conventional: steps_per_generation=1 is on-policy, 2 is at most one step behind.",
        )
    if world.offload_optimizer and (config.use_deepspeed or config.use_fsdp):
        return ConfigError(
            "world.offload_optimizer",
            True,
            "false with use_deepspeed or use_fsdp",
            "Use the plain backend (use_deepspeed=false), or a DeepSpeed configuration with offload.",
        )
    if world.num_preprocessor_llms or (world.num_preprocessor_llms is None and world.preprocessor_fraction > 0):
        return ConfigError(
            "world.preprocessor_fraction",
            world.preprocessor_fraction,
            "0 with world.placement=colocated: the reference model is beside the trainer",
            "Set it to 0 and leave finetune.rl.reference at auto.",
        )
    return None


def gpu_lists(config: RunConfig) -> ConfigError | None:
    """Lists of GPUs name those of every pool."""
    world = config.world
    lists = {key: getattr(world, key) for key in GPU_LISTS}
    if all(value is None for value in lists.values()):
        return None
    wanted = {
        "actor_gpus": config.debug.mode not in _WITHOUT_ACTOR,
        "preprocessor_gpus": config.has_reference_pool,
        "finetune_gpus": config.debug.mode not in _WITHOUT_TRAINER,
    }
    for key, value in lists.items():
        if value is None:
            if wanted[key]:
                others = ", ".join(f"world.{other}" for other, given in lists.items() if given is not None)
                example = "[1]" if key == "finetune_gpus" else "[[0]]"
                return ConfigError(
                    f"world.{key}", None, f"a list of GPUs, as in {others}", f"Set for instance world.{key}={example}."
                )
            continue
        for gpus in [value] if key == "finetune_gpus" else value:
            if len(set(gpus)) != len(gpus) or not gpus:
                return ConfigError(
                    f"world.{key}",
                    value,
                    "each GPU once for one server, and once for all ranks together (NCCL refuses two ranks on one)",
                    "Remove what is there twice.",
                )
    return None


def stream_url(config: RunConfig) -> ConfigError | None:
    """An address belongs to Redis and is one of Redis."""
    streams = config.streams
    if streams.url is None:
        return None
    if streams.backend != "redis":
        return ConfigError("streams.url", streams.url, "null with streams.backend=files", "Add streams=redis.")
    if urlsplit(streams.url).scheme not in _REDIS_SCHEMES:
        return ConfigError(
            "streams.url", streams.url, "redis://HOST:PORT/DB", "Leave it out to have the launcher start a server."
        )
    return None


def heartbeat(config: RunConfig) -> ConfigError | None:
    """A process must be able to beat before it counts as stuck."""
    supervise = config.supervise
    if supervise.heartbeat_timeout_s <= supervise.heartbeat_interval_s:
        return ConfigError(
            "supervise.heartbeat_timeout_s",
            supervise.heartbeat_timeout_s,
            f"more than supervise.heartbeat_interval_s={supervise.heartbeat_interval_s}",
            "Use at least ten intervals.",
        )
    return None


def subset(config: RunConfig) -> ConfigError | None:
    """A part of the training problems has a beginning and an end."""
    part = config.train_subset
    if part is None:
        return None
    if set(part) != {"begin", "end"} or not 0 <= part["begin"] < part["end"]:
        return ConfigError(
            "train_subset",
            part,
            "{begin: B, end: E} with 0 <= B < E",
            "Write for instance train_subset={begin:0,end:100}.",
        )
    return None


def own_streams(config: RunConfig) -> ConfigError | None:
    """A run reads what it wrote; a stage alone reads what another run wrote."""
    source, mode = config.debug.streams_from, config.debug.mode
    if mode in READING_MODES and source is None:
        return ConfigError(
            "debug.streams_from", None, f"the output_dir of another run with debug.mode={mode}", "Name a recorded run."
        )
    if mode in READING_MODES and Path(str(source)).absolute() == Path(config.output_dir).absolute():
        return ConfigError(
            "debug.streams_from", source, "another run than output_dir", "Choose another output_dir for this stage."
        )
    if mode not in READING_MODES and source is not None:
        return ConfigError(
            "debug.streams_from",
            source,
            f"null with debug.mode={mode!r}: a run reads its own streams",
            "Leave it out; to go on with that run, give its folder as output_dir.",
        )
    return None


def known_stages(config: RunConfig) -> ConfigError | None:
    """A mode names stages that can run without the others."""
    if config.debug.mode not in STAGE_KINDS:
        return ConfigError(
            "debug.mode",
            config.debug.mode,
            "one of " + ", ".join(repr(mode) for mode in STAGE_KINDS),
            "Run debug.mode=preprocessor first, then debug.mode=finetune on its streams.",
        )
    return None


def rollout_function(config: RunConfig) -> ConfigError | None:
    """Rollouts come from an agent function or from a rollout function."""
    if config.actor.agent_func_path is not None and config.actor.rollout_policy != AGENT_ROLLOUT:
        return ConfigError(
            "actor.rollout_policy",
            config.actor.rollout_policy,
            f"null with actor.agent_func_path={config.actor.agent_func_path}",
            "Set one of the two; --config-name agent starts without a task.",
        )
    return None


def agent_prompts(config: RunConfig) -> ConfigError | None:
    """An agent function needs prompts."""
    if config.actor.agent_func_path is not None and config.dataset_loader is None:
        return ConfigError(
            "agent.prompt_data",
            config.agent.prompt_data,
            "a JSONL file or the name of a Hugging Face data set, for actor.agent_func_path",
            "Set it, and agent.input_key to the column of the prompts.",
        )
    return None


RULES = (
    shares,
    actor_share,
    trainer_share,
    shared_devices,
    gpu_lists,
    stream_url,
    heartbeat,
    subset,
    own_streams,
    known_stages,
    rollout_function,
    agent_prompts,
)
