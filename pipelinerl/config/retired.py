"""Keys of earlier PipelineRL configurations that the schema does not have: old files and overrides get an answer.

Called by the composition before validation, and by the test of `docs/configuration.md`. A key either does nothing
here, and is taken out with a note, or is refused with the name of what replaced it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pipelinerl.config.messages import raise_faults
from pipelinerl.errors import ConfigError


class Retired(NamedTuple):
    """`replacement` None: the key does nothing, `note` says why. Else it is refused, `note` says what changed."""

    key: str
    note: str
    replacement: str | None = None


RETIRED_KEYS: tuple[Retired, ...] = (
    Retired("jobs", "the plan of the run is worked out and written to conf/world.json"),
    Retired("me", "each process is told on its command line which job it is"),
    Retired("fp32_layer_prefix", "the output head is found by the structure of the model"),
    Retired("finetune.fp32_layer_prefix", "the output head is found by the structure of the model"),
    Retired("finetune.data", "samples come from the stream that finetune.input names"),
    Retired("finetune.eval_callback", "evaluation is the actor's, see eval_every_n_versions"),
    Retired("finetune.max_eval_steps", "evaluation is the actor's, see actor.test_samples"),
    Retired("finetune.n_examples", "the number of samples follows from finetune.max_train_steps"),
    Retired("finetune.sft_config_name", "there is no supervised objective"),
    Retired("finetune.rl.batch_size", "it is train_batch_size * gradient_accumulation_passes"),
    Retired("actor.chunk_size", "whole groups are handed out"),
    Retired("actor.sampling", "problems are drawn in an order that follows from seed"),
    Retired("actor.submit_delay", "the servers' slots set the pace"),
    Retired("preprocess.chunk_size", "whole groups are handed out"),
    Retired("preprocess.submit_delay", "the servers' slots set the pace"),
    Retired("preprocess.threads_per_llm", "the reference servers batch by themselves"),
    Retired("actor.threads_per_llm", "rollouts are tasks of one event loop", "actor.llm_max_rollouts"),
    Retired("preprocess.queue_size", "there are two queues", "preprocess.raw_queue_size"),
    Retired("finetune.rl.algo", "the key was renamed", "finetune.rl.policy_loss"),
    Retired(
        "finetune.rl.epsilon", "the two bounds are separate", "finetune.rl.epsilon_low and finetune.rl.epsilon_high"
    ),
    Retired("finetune.rl.group_normalization", "the divisor of the loss has a name", "finetune.rl.aggregation=group"),
    Retired("streams.host", "host and port are one address", "streams.url=redis://HOST:PORT/0"),
    Retired("streams.port", "host and port are one address", "streams.url=redis://HOST:PORT/0"),
    Retired("world.actors", "one actor serves all servers", "actor.rollout_workers"),
    Retired("world.preprocessors", "one preprocessor keeps up with all servers"),
    Retired("system_prompt", "it belongs to the rollout", "actor.system_prompt"),
    Retired("task_template", "it belongs to the rollout", "actor.task_template"),
    Retired("discount_factor", "it belongs to the rollout", "actor.discount_factor"),
    Retired("environments", "a run has one environment", "environment"),
    Retired("environment_key", "a run has one environment", "environment"),
    Retired("use_fast_llm", "there is one trainer", "use_deepspeed or use_fsdp"),
    Retired("fast_llm", "there is one trainer", "the keys below finetune"),
    Retired("weight_broadcast", "weights are always broadcast", "finetune.send_weight_updates"),
    Retired("llm.chat_template_kwargs", "templates get no arguments", "a chat template in the model's folder"),
    Retired("test_llm.chat_template_kwargs", "templates get no arguments", "a chat template in the model's folder"),
    *(
        Retired(f"finetune.{name}", "tracking has a section of its own", f"wandb.{name}")
        for name in (
            *("tags", "use_wandb", "wandb_id", "wandb_name", "wandb_entity_name", "wandb_project_name"),
            *("wandb_resume", "wandb_use_basename", "wandb_workspace_root", "wandb_group", "wandb_dir"),
        )
    ),
)


def is_retired_key(key: str) -> bool:
    """True for a key (or one below it) that `take_retired_keys` answers for."""
    return any(key == retired.key or key.startswith(retired.key + ".") for retired in RETIRED_KEYS)


def take_retired_keys(data: dict[str, Any], origin_of: Callable[[str], str]) -> list[str]:
    """Take keys that do nothing out of `data`, in place, and return a note for each that had a value.

    Raises:
        ConfigError: a refused key is there; the message names the replacement.
    """
    notes: list[str] = []
    faults: list[ConfigError] = []
    for retired in RETIRED_KEYS:
        *heads, leaf = retired.key.split(".")
        section: Any = data
        for part in heads:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or leaf not in section:
            continue
        value = section.pop(leaf)
        if retired.replacement is not None:
            expected = f"{retired.replacement} instead ({retired.note})"
            faults.append(
                ConfigError(retired.key, value, expected, f"Change the key; it was set {origin_of(retired.key)}.")
            )
        elif value not in (None, [], {}, 0, -1, "", "???"):
            notes.append(f"{retired.key} does nothing here: {retired.note}")
    raise_faults(faults)
    return notes
