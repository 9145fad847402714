"""What the keys are, in words: the tables of `docs/configuration.md` and the text of `launch --help`, from the schema.

`python scripts/document.py` renews the page; a test compares it with what is made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.commands import typed
from pipelinerl.config.keys import Key, known_keys
from pipelinerl.config.load import config_names
from pipelinerl.config.section import DOTTED
from pipelinerl.errors import ConfigError

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
GROUPS = ("backend", "finetune", "rewards", "streams", "world")
#: Keys that most runs set, for the short help.
_COMMON = (
    *("model_path", "actor.rollout_policy", "dataset_loader", "train_dataset_names", "test_dataset_names", "attempts"),
    *("max_lag", "schedule", "finetune.max_train_steps", "finetune.learning_rate"),
    *("finetune.gradient_accumulation_passes", "finetune.seq_length", "finetune.rl.policy_loss"),
    *("finetune.rl.advantage_estimator", "llm.parameters.max_tokens", "llm.parameters.temperature"),
    *("world.actor_fraction", "world.finetune_fraction", "wandb.mode", "tensorboard.enabled"),
)
_HELP = """\
Train a language model by asynchronous reinforcement learning.

usage: {launch} [--config-name NAME] [--config-dir DIR] [--multirun] output_dir=DIR [key=value ...]

  output_dir=DIR       where the run writes everything (required)
  --config-name NAME   the experiment, or a configuration of yours (default: math, small sums that need no dataset);
                       base is a template without a task: extend it
  --config-dir DIR     a folder of yours with NAME.yaml and your task's code; it may say `defaults: [base, _self_]`
  -m, --multirun       one run for each value of keys such as seed=1,2,3, one after the other, in folders of output_dir
  --cfg                print the resolved configuration and exit
  --help [SECTION]     print this text, or the keys of a section such as finetune.rl, and exit

  key=value            set a key, for instance finetune.learning_rate=1e-5
  +key=value           add a key below a mapping with free keys;  ~key removes one
  group=name           choose a file of a group, for instance streams=redis
  dry_run=true         print the plan (jobs, devices, ports, commands) and start nothing

configurations: {names}
{groups}

keys that most runs set (--help SECTION lists all; so does docs/configuration.md):
{keys}

examples:
  {launch} output_dir=results/math
  {launch} --config-name quickstart output_dir=results/quickstart
  {launch} --config-dir my_task --config-name my_task output_dir=results/my_task

a configuration of PipelineRL: {convert} OLD.yaml
"""


def help_text(search_dirs: Sequence[Path], section: str = "") -> str:
    """The help, with the names of the configurations in `search_dirs`; or the keys of one section.

    Raises:
        ConfigError: no key is called like that.
    """
    if section:
        keys = [key for key in known_keys() if f"{key.name}.".startswith(f"{section.rstrip('.')}.")]
        if not keys:
            sections = sorted({key.name.rpartition(".")[0] for key in known_keys()} - {""})
            raise ConfigError("--help", section, "a key or one of " + ", ".join(sections), "Leave it out for the help.")
        return "\n".join([*(line for key in keys for line in _lines(key)), ""])
    groups = [
        f"group {group}: {', '.join(config_names(*(folder / group for folder in search_dirs)))}" for group in GROUPS
    ]
    by_name = {key.name: key for key in known_keys()}
    common = [line for name in _COMMON for line in _lines(by_name[name])]
    return _HELP.format(
        names=", ".join(config_names(*search_dirs)),
        groups="\n".join(groups),
        keys="\n".join(common),
        launch=typed("launch"),
        convert=typed("convert"),
    )


def tables() -> str:
    """All keys as Markdown, a table for each section."""
    sections: dict[str, list[Key]] = {}
    for key in known_keys():
        sections.setdefault(key.name.rpartition(".")[0] or "top level", []).append(key)
    lines: list[str] = []
    for section, keys in sections.items():
        lines += [f"### {section}", "", "| key | default | what it does |", "|---|---|---|"]
        lines += [f"| `{key.name}` | {_default(key)} | {_description(key)} |" for key in keys]
        lines.append("")
    return "\n".join(lines)


def renew(text: str) -> str:
    """Return the document with new tables between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


def _lines(key: Key) -> Iterator[str]:
    default = _default(key).replace("`", "")
    yield f"  {key.name:<40} {_description(key).replace('`', '')} [{default}]"


def _description(key: Key) -> str:
    text = key.field.description or ""
    if key.choice is not None:
        text += ". One of " + ", ".join(f"`{tag}`" for tag in key.choice)
    if key.chooser:
        text += f" (only with {key.chooser.rpartition('.')[2]}: {', '.join(key.owners)})"
    return text.replace("|", "\\|")


def _default(key: Key) -> str:
    if key.field.is_required():
        return "required"
    first = key.field.get_default(call_default_factory=True)
    defaults = [_value(first)]
    defaults += [f"{_value(value)} with {tag}" for tag, value in key.defaults if value != first and tag != DOTTED]
    return ", ".join(defaults)


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"`{value}`" if value != "" else '`""`'
