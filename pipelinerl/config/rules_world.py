"""Rules of the split, the streams, the data and the supervisor. Called through `rules.validate`."""

from __future__ import annotations

from urllib.parse import urlsplit

from pipelinerl.config.agent import AGENT_ROLLOUT
from pipelinerl.config.run import RunConfig
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
    """A run reads what it wrote."""
    if config.debug.streams_from is not None:
        return ConfigError(
            "debug.streams_from",
            config.debug.streams_from,
            "null: a run reads its own streams",
            "Leave it out; to go on with that run, give its folder as output_dir.",
        )
    return None


def rollout_function(config: RunConfig) -> ConfigError | None:
    """Rollouts come from an agent function or from a rollout function."""
    if config.actor.agent_func_path is not None and config.actor.rollout_policy != AGENT_ROLLOUT:
        return ConfigError(
            "actor.rollout_policy",
            config.actor.rollout_policy,
            f"null with actor.agent_func_path={config.actor.agent_func_path}",
            "Set one of the two.",
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
    stream_url,
    heartbeat,
    subset,
    own_streams,
    rollout_function,
    agent_prompts,
)
