"""Section `agent`: where an agent function's prompts come from, and what `actor.agent_func_path` sets elsewhere.

Files are looked up by name and not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.config.task import AgentConfig
from pipelinerl.errors import ConfigError

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
    actor["agent_func_path"] = str(Path(found_file(actor["agent_func_path"], search_dirs)).absolute())
    if actor.get("rollout_policy") is None:
        actor["rollout_policy"] = AGENT_ROLLOUT
    agent = data.get("agent") or {}
    prompts = agent.get("prompt_data")
    if data.get("dataset_loader") is not None or not isinstance(prompts, str | list) or not prompts:
        return
    data["dataset_loader"] = PROMPT_LOADER
    data["dataset_loader_params"] = {
        **{key: agent[key] for key in _LOADER_KEYS if key in agent},
        "model_path": data.get("model_path"),
        "trust_remote_code": bool((data.get("finetune") or {}).get("trust_remote_code")),
    }
    if agent.get("apply_chat_template") and actor.get("system_prompt"):
        data["dataset_loader_params"]["system_prompt"] = actor["system_prompt"]
    llm = data.get("llm")
    if isinstance(llm, dict) and llm.get("chat_template_kwargs"):
        data["dataset_loader_params"]["chat_template_kwargs"] = llm["chat_template_kwargs"]
    data["train_dataset_names"] = names = _data_sets(prompts, "agent.prompt_data", search_dirs)
    if agent.get("prompt_data_probs") is not None:
        data["dataset_loader_params"]["shares"] = _shares(agent["prompt_data_probs"], names)
    data["test_dataset_names"] = _data_sets(agent.get("eval_data"), "agent.eval_data", search_dirs)
    for own in data.get("eval") or []:
        if isinstance(own, dict) and isinstance(own.get("name"), str):
            own["name"] = found_file(own["name"], search_dirs)


def unused_agent_keys(config: RunConfig) -> Iterator[str]:
    """A remark about keys of this section that are set and that nothing reads."""
    changed = [key for key, field in AgentConfig.model_fields.items() if getattr(config.agent, key) != field.default]
    reason = "without actor.agent_func_path"
    if config.actor.agent_func_path is not None:
        of_loader = ("prompt_data", "prompt_data_probs", "eval_data", *_LOADER_KEYS)
        changed = [key for key in changed if key in of_loader and config.dataset_loader != PROMPT_LOADER]
        reason = f"with dataset_loader={config.dataset_loader}"
    if changed:
        yield f"{', '.join(f'agent.{key}' for key in changed)} has no effect {reason}"


def _data_sets(value: Any, key: str, search_dirs: Sequence[Path]) -> list[str]:
    """Return the names in `value`, a list or a text with commas, with files as absolute paths.

    Raises:
        ConfigError: a name is empty or a number.
    """
    if value is None:
        return []
    parts: list[Any] = [value] if isinstance(value, str) else list(value)
    if isinstance(value, str) and not Path(found_file(value, search_dirs)).is_file():
        parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if not isinstance(part, str) or not part or not math.isnan(_number(part)):
            next_step = "How often each is drawn goes into agent.prompt_data_probs."
            raise ConfigError(key, value, "names of data sets with commas between them", next_step)
    return [found_file(part, search_dirs) for part in parts]


def _shares(value: Any, names: Sequence[str]) -> dict[str, float]:
    """Return how often each of `names` is drawn.

    Raises:
        ConfigError: `value` is not one number above 0 for each name, or a name is there twice.
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers = [_number(part) for part in parts]
    if len(numbers) != len(names) or not all(0 < number < math.inf for number in numbers):
        expected = f"{len(names)} numbers above 0, one for each data set of agent.prompt_data"
        next_step = "Write for instance agent.prompt_data_probs=0.7,0.3 for two, or null to draw all equally often."
        raise ConfigError("agent.prompt_data_probs", value, expected, next_step)
    if len(set(names)) != len(names):
        expected = "each data set once with agent.prompt_data_probs"
        raise ConfigError("agent.prompt_data", list(names), expected, "Name it once, with the sum of its numbers.")
    return dict(zip(names, numbers, strict=True))


def _number(value: Any) -> float:
    """`value` as a number; NaN if it is none."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan


def found_file(name: str, search_dirs: Sequence[Path]) -> str:
    """Return the absolute path if `name` is a file, looked up in the user's folders first; else `name`."""
    places = [folder / Path(name).expanduser() for folder in (*search_dirs, Path())]
    return str(next((place.absolute() for place in places if place.is_file()), name))
