"""Section `agent`: where an agent function's prompts come from, and what `actor.agent_func_path` sets elsewhere.

`settle_agent` is called by the composition, before validation. Reads no file but the agent function's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelinerl.config.base import Section

AGENT_ROLLOUT = "pipelinerl.agents.agent_func.generate_agent_rollout"
PROMPT_LOADER = "pipelinerl.agents.prompt_data.load_prompts"
_LOADER_KEYS = ("input_key", "label_key", "apply_chat_template", "prompt_max_len", "max_samples")


class AgentConfig(Section):
    """Prompts and episodes of the agent function. It takes effect with `actor.agent_func_path`."""

    prompt_data: str | None = None
    eval_data: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    apply_chat_template: bool = False
    prompt_max_len: int = Field(default=1024, ge=1, description="tokens; longer prompts are left out")
    max_samples: int | None = Field(default=None, ge=1)
    max_epochs: int | None = Field(default=None, ge=1, description="passes over the prompts; null: no such end")
    max_steps: int = Field(default=64, ge=1, description="calls of the agent function in one rollout")
    reward: Literal["sum", "last"] = "sum"


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
    prompts = agent.get("prompt_data")
    if data.get("dataset_loader") is not None or not isinstance(prompts, str):
        return
    data["dataset_loader"] = PROMPT_LOADER
    data["dataset_loader_params"] = {
        **{key: agent[key] for key in _LOADER_KEYS if key in agent},
        "model_path": data.get("model_path"),
        "trust_remote_code": bool((data.get("finetune") or {}).get("trust_remote_code")),
    }
    data["train_dataset_names"] = [_found(prompts, search_dirs)]
    held_out = agent.get("eval_data")
    data["test_dataset_names"] = [_found(held_out, search_dirs)] if isinstance(held_out, str) else []


def _found(name: str, search_dirs: Sequence[Path]) -> str:
    """Return the absolute path if `name` is a file, looked up in the user's folders first; else `name`."""
    places = [folder / Path(name).expanduser() for folder in (*search_dirs, Path())]
    return str(next((place.absolute() for place in places if place.is_file()), name))


def steps_of_epochs(num_prompts: int, attempts: int, max_epochs: int, samples_per_step: int) -> int:
    """Return the optimizer steps of `max_epochs` passes over the prompts, rounded down, at least 1."""
    return max(1, num_prompts * attempts * max_epochs // samples_per_step)
