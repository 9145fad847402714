"""Section `agent`: where an agent function's prompts come from, and what `actor.agent_func_path` sets elsewhere.

`settle_agent` is called by the composition, before validation, `unused_agent_keys` after it. They look files up by name
and read none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.config.task import AgentConfig
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from pipelinerl.config.run import RunConfig

AGENT_ROLLOUT = "pipelinerl.agents.agent_func.generate_agent_rollout"
PROMPT_LOADER = "pipelinerl.domains.prompt_data.load_prompts"
#: Keys of data sets, several of them with commas between.
DATA_KEYS = ("agent.prompt_data", "agent.prompt_data_probs", "agent.eval_data")
_LOADER_KEYS = ("input_key", "label_key", "apply_chat_template", "prompt_max_len", "max_samples")


def settle_agent(data: dict[str, Any], search_dirs: Sequence[Path]) -> None:
    """With an agent function, fill in what is not set, in place: rollout function, loader and names of the prompts.

    Relative paths are looked up in the user's configuration folders, then in the current one.
    """
    actor = data.get("actor")
    if not isinstance(actor, dict) or not isinstance(actor.get("agent_func_path"), str):
        return
    actor["agent_func_path"] = _found(actor["agent_func_path"], search_dirs)
    if not Path(actor["agent_func_path"]).is_absolute():
        actor["agent_func_path"] = str(Path(actor["agent_func_path"]).absolute())
    if actor.get("rollout_policy") is None:
        actor["rollout_policy"] = AGENT_ROLLOUT
    agent = data.get("agent") or {}
    prompts, held_out = agent.get("prompt_data"), agent.get("eval_data")
    if data.get("dataset_loader") is not None or not isinstance(prompts, str | list) or not prompts:
        return
    data["dataset_loader"] = PROMPT_LOADER
    data["dataset_loader_params"] = {
        **{key: agent[key] for key in _LOADER_KEYS if key in agent},
        "model_path": data.get("model_path"),
        "trust_remote_code": bool((data.get("finetune") or {}).get("trust_remote_code")),
    }
    names = _data_sets(prompts, "agent.prompt_data", search_dirs)
    data["train_dataset_names"] = names
    if agent.get("prompt_data_probs") is not None:
        data["dataset_loader_params"]["shares"] = _shares(agent["prompt_data_probs"], names)
    data["test_dataset_names"] = _data_sets(held_out, "agent.eval_data", search_dirs)


def unused_agent_keys(config: RunConfig) -> list[str]:
    """Return a remark about keys of this section that are set and that nothing reads."""
    settings = [
        name for name, field in AgentConfig.model_fields.items() if getattr(config.agent, name) != field.default
    ]
    if config.actor.agent_func_path is None:
        reason = "without actor.agent_func_path"
    elif config.dataset_loader != PROMPT_LOADER:
        settings = [
            name for name in settings if name in ("prompt_data", "prompt_data_probs", "eval_data", *_LOADER_KEYS)
        ]
        reason = f"with dataset_loader={config.dataset_loader}, which loads the problems by itself"
    else:
        return []
    if not settings:
        return []
    names = ", ".join(f"agent.{name}" for name in settings)
    return [f"{names} {'does' if len(settings) == 1 else 'do'} nothing {reason}"]


def _data_sets(value: Any, key: str, search_dirs: Sequence[Path]) -> list[str]:
    """Return the names in `value`, a list or a text with commas, with files as absolute paths.

    Raises:
        ConfigError: a name is empty or a number.
    """
    if value is None:
        return []
    if isinstance(value, str):
        whole = _found(value, search_dirs)
        parts: list[Any] = [value] if Path(whole).is_file() else [part.strip() for part in value.split(",")]
    else:
        parts = list(value)
    for part in parts:
        if not isinstance(part, str) or _is_number(part):
            raise ConfigError(
                key,
                value,
                "names of data sets, without numbers between them",
                "Write how often each is drawn into agent.prompt_data_probs, or name a data set more often.",
            )
        if not part:
            raise ConfigError(key, value, "a name between two commas", "Remove the comma, or name another data set.")
    return [_found(part, search_dirs) for part in parts]


def _shares(value: Any, names: Sequence[str]) -> dict[str, float]:
    """Return how often each of `names` is drawn.

    Raises:
        ConfigError: `value` is not one number above 0 for each name, or a name is there twice.
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers = [float(part) if _is_number(str(part)) else math.nan for part in parts]
    if len(numbers) != len(names) or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(
            "agent.prompt_data_probs",
            value,
            f"{len(names)} numbers above 0, one for each data set of agent.prompt_data",
            "Write for instance agent.prompt_data_probs=0.7,0.3 for two of them, or leave it at null: all prompts are "
            "then drawn equally often.",
        )
    if len(set(names)) != len(names):
        raise ConfigError(
            "agent.prompt_data",
            list(names),
            "each data set once with agent.prompt_data_probs",
            "Name it once, with the sum of its numbers.",
        )
    return dict(zip(names, numbers, strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _found(name: str, search_dirs: Sequence[Path]) -> str:
    """Return the absolute path if `name` is a file, looked up in the user's folders first; else `name`."""
    places = [folder / Path(name).expanduser() for folder in (*search_dirs, Path())]
    return str(next((place.absolute() for place in places if place.is_file()), name))
