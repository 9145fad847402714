"""Parts of the pipeline alone (`debug.mode`): which jobs a mode has, and the configuration that it runs with. Pure.

Called by the launcher before anything else looks at the configuration, and by the placement of jobs.
"""

from __future__ import annotations

from typing import Any

from pipelinerl.config.run import RunConfig

_ALL = ("actor_llm", "preprocessor_llm", "environment", "verifier", "actor", "preprocessor", "finetune")
STAGE_KINDS: dict[str, tuple[str, ...]] = {
    "": _ALL,
    "open_loop": _ALL,
    "actor": ("actor_llm", "environment", "verifier", "actor"),
    "preprocessor": ("preprocessor_llm", "preprocessor"),
    "finetune": ("finetune",),
}
#: Modes that read what another run wrote (`debug.streams_from`).
READING_MODES = ("preprocessor", "finetune")
_POOLS = {
    "actor_llm": ("actor_fraction", "num_actor_llms", "actor_gpus"),
    "preprocessor_llm": ("preprocessor_fraction", "num_preprocessor_llms", "preprocessor_gpus"),
    "finetune": ("finetune_fraction", "num_finetune_ranks", "finetune_gpus"),
}


def has_stage(config: RunConfig, kind: str) -> bool:
    """Whether jobs of that kind are part of the mode."""
    return kind in STAGE_KINDS[config.debug.mode]


def stage_config(config: RunConfig) -> RunConfig:
    """The configuration of the stages that `debug.mode` names: the others get no devices, and no weights are sent to
    servers in mid run. Servers of an open loop are not started again: nobody has their first weights any more."""
    mode = config.debug.mode
    if not mode:
        return config
    world: dict[str, Any] = {}
    for kind, (fraction, count, gpus) in _POOLS.items():
        if kind not in STAGE_KINDS[mode]:
            world |= {fraction: 0.0, count: None, gpus: None}
    changes: dict[str, Any] = {
        "world": config.world.model_copy(update=world),
        "finetune": config.finetune.model_copy(update={"send_weight_updates": False}),
    }
    if mode == "open_loop":
        changes["supervise"] = config.supervise.model_copy(update={"max_server_restarts": 0})
    return config.model_copy(update=changes)
