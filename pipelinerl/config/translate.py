"""The keys of one configuration file of PipelineRL as ours. What the file includes: `config/convert.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipelinerl.config.faults import nearest_key
from pipelinerl.config.former_keys import (
    DATA_SETS,
    DROPPED,
    DROPPED_ARGUMENTS,
    GRADING_SERVICES,
    LACKING,
    LACKING_DATA,
    LOADER_ARGUMENTS,
    MOVED,
    RENAMED,
    VALUES,
)
from pipelinerl.config.keys import default_of, is_known, known_keys, value_at, values_of
from pipelinerl.config.run import LIKE_TRAINING
from pipelinerl.config.section import DOTTED

_ABSENT = object()
_RL = "finetune.rl"
_CONTEXT = "vllm_config.vllm_kwargs.max_model_len"
_FUNCTIONS = ("dataset_loader", "actor.rollout_policy")
#: Room for a prompt where an output has to be shortened to fit into the context.
_PROMPT_TOKENS = 1024
_REFERENCE = re.compile(r"\$\{(\.*)([\w-]+(?:\.[\w-]+)*)\}")


class Conversion:
    """One file on its way. `lines` say what happened, `failed` that something has no translation.

    Args:
        data: keys of PipelineRL, nested from the root.
        inherited: translated keys of what the file includes.

    `old` has the keys of PipelineRL that the file and what it includes have, where that is known.
    """

    def __init__(self, data: dict[str, Any], inherited: Mapping[str, Any] | None = None) -> None:
        self.data = data
        self.inherited = inherited or {}
        self.old: dict[str, Any] = {}
        self.lines: list[str] = []
        self.failed = False

    def run(self) -> dict[str, Any]:
        """The translated data."""
        self.data = _mapped(self.data, _absolute)
        if self._get(f"{_RL}.use_advantages") is False:
            self._take(f"{_RL}.advantage_estimator")
        for rewrite in (self._backend, self._streams, self._task, self._evaluation):
            rewrite()
        for key in VALUES:
            self._translate_value(key)
        for key, new in RENAMED.items():
            self._rename(key, new)
        for key, reason in DROPPED.items():
            if self._take(key) is not _ABSENT:
                self.say("dropped", key, reason)
        self._clip_range()
        self._samples_to_steps()
        self._lengths()
        self._drop_foreign_keys()
        self._drop_unknown_keys()
        self.data = _mapped(self.data, _renamed)
        self._check_references(self.data)
        return self.data

    def _translate_value(self, key: str) -> None:
        value = self._get(key)
        if value is _ABSENT or (new := VALUES[key].of(value)) == "":
            return
        self._take(key)
        if isinstance(new, tuple):
            self._replace(f"{key}={value}", *new)
        elif new is None:
            self.say("dropped", key, "it asks for nothing")
        else:
            self.fail(key, f"{value!r} is not supported: {new}")

    def _backend(self) -> None:
        deepspeed, config = self._take("use_deepspeed"), self._take("deepspeed_config")
        fsdp, dtypes = self._take("use_fsdp"), self._take("fsdp")
        backend: dict[str, Any] = {}
        if fsdp is True:
            wanted = dtypes if isinstance(dtypes, dict) else {}
            backend = {"type": "fsdp", **{key: wanted[key] for key in ("param_dtype", "reduce_dtype") if key in wanted}}
        elif deepspeed is False:
            backend = {"type": "plain"}
        elif deepspeed is True or config is not _ABSENT:
            backend = {"type": "deepspeed", **({} if config in (_ABSENT, None) else {"config": config})}
        if backend:
            self._set("backend", backend)
            self.say("changed", "use_deepspeed, deepspeed_config, use_fsdp, fsdp", f"now backend: {backend}")

    def _clip_range(self) -> None:
        """One epsilon was both bounds, and the upper one also the bound of REINFORCE's weights."""
        epsilon = self._take(f"{_RL}.epsilon")
        if epsilon not in (_ABSENT, None):
            for name in ("epsilon_low", "epsilon_high"):
                self._replace(f"{_RL}.epsilon", f"{_RL}.{name}", epsilon)
        high = self._get(f"{_RL}.epsilon_high")
        if self._value(f"{_RL}.policy_loss") == "reinforce" and isinstance(high, int | float):
            self._take(f"{_RL}.epsilon_high")
            self._replace(f"{_RL}.epsilon_high", f"{_RL}.clamp", round(1 + high, 9))

    def _streams(self) -> None:
        host, port = self._take("streams.host"), self._take("streams.port")
        if host not in (_ABSENT, None):
            port = 6379 if port in (_ABSENT, None) else port
            self._replace("streams.host, streams.port", "streams.url", f"redis://{host}:{port}/0")
        elif port is not _ABSENT:
            self.say("dropped", "streams.port", "the launcher chooses a free one for its server")

    def _task(self) -> None:
        """Functions of built-in tasks, their data sets, and what serves their graders."""
        for key in _FUNCTIONS:
            path = str(self._get(key))
            reason = next((reason for start, reason in LACKING.items() if path.startswith(start)), None)
            if path in MOVED:
                self._set(key, MOVED[path])
                self.say("changed", key, f"now {MOVED[path]}")
            elif reason is not None:
                self.fail(key, f"{path}: {reason}")
        loader = str(self._value("dataset_loader"))
        domain = loader.split(".")[2] if loader.startswith("pipelinerl.domains.") else None
        self._data_sets(domain)
        if domain == "coding":
            self._rename("max_tests_per_problem", "dataset_loader_params.max_tests")
        elif self._take("max_tests_per_problem") is not _ABSENT:
            self.say("dropped", "max_tests_per_problem", "only the task coding has such a limit")
        services = self._get("environments")
        if isinstance(services, list) and services:
            foreign = [each for each in services if value_at(each, "_target_") not in GRADING_SERVICES]
            if not foreign:
                self._take("environments")
                self.say("dropped", "environments", "each rollout worker grades; world.verifier_replicas adds services")
        target = str(self._get("environment._target_"))
        for start, reason in LACKING.items():
            if target.startswith(start):
                self._take("environment")
                self.fail("environment", f"{target}: {reason}")
        buffer = self._get("rewards.buffer_tokens")
        if isinstance(buffer, int) and buffer > 0 and self._get("rewards.components") is _ABSENT:
            self._set("rewards.components", {"outcome": 1.0, "soft_length": 1.0})
            self.say("changed", "rewards.buffer_tokens", "it takes the component soft_length, which is added")
        replicas = self._get("world.env_replicas")
        if replicas is not _ABSENT and self._value("environment", None) is None:
            self._take("world.env_replicas")
            self.say("dropped", "world.env_replicas", "there is no environment to serve")

    def _data_sets(self, domain: str | None) -> None:
        """The names of data sets as a list; in a built-in task also what they are, and the loader's arguments."""
        for key in ("train_dataset_names", "test_dataset_names"):
            given = self._get(key)
            names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
            new = [DATA_SETS.get(str(name), name) if domain else name for name in names]
            if names and new != given and not str(given).startswith("${"):
                self._set(key, new)
                self.say("changed", key, f"now {new}")
            for name in map(str, names):
                if domain and name in LACKING_DATA:
                    self.fail(key, f"{name} is unknown here, {LACKING_DATA[name]}")
        arguments = self._get("dataset_loader_params")
        if domain is None or not isinstance(arguments, dict):
            return
        known = LOADER_ARGUMENTS.get(domain, {})
        for name, value in list(arguments.items()):
            key = f"dataset_loader_params.{name}"
            if value is None:
                self._take(key)
                self.say("dropped", key, "it asks for nothing")
            elif name not in known:
                self._take(key)
                self.say("dropped", key, DROPPED_ARGUMENTS.get(name, "the loader has no such argument"))
            elif known[name] != name:
                self._rename(key, f"dataset_loader_params.{known[name]}")

    def _samples_to_steps(self) -> None:
        """Versions are optimizer steps; PipelineRL counts the samples that a version has seen."""
        names = [f"finetune.{name}" for name in ("train_batch_size", "gradient_accumulation_passes")]
        sizes = [self._value(name) for name in names]
        if not all(isinstance(size, int) for size in sizes):
            sizes = []
        samples = math.prod(sizes)
        has_own_size = any(self._get(name) is not _ABSENT for name in names)
        for key, rounded in (("eval_every_n_versions", round), ("finetune.weight_update_interval", math.ceil)):
            value = self._get(key)
            if value == 0:
                self.say("changed", key, "0: before and after training; test_dataset_names=[] evaluates never")
            known = value
            if value is _ABSENT and has_own_size and sizes:  # what is included has it for steps of another size
                value, known = value_at(self.old, key, _ABSENT), value_at(self.inherited, key, _ABSENT)
                value = value if isinstance(value, int) else _ABSENT
            if value in (_ABSENT, 0):
                continue
            if not isinstance(value, int) or not sizes:
                self.fail(key, f"{value!r}: write a number of optimizer steps; PipelineRL counts samples")
                continue
            steps = max(1, rounded(value / samples))
            if steps != known:
                self._set(key, steps)
                self.say("changed", key, f"now {steps}: {value} samples are so many optimizer steps of {samples}")

    def _evaluation(self) -> None:
        for name in (*(f"parameters.{name}" for name in LIKE_TRAINING), "chat_template_kwargs"):
            key, followed = f"test_llm.{name}", f"llm.{name}"
            if self._get(key) is not _ABSENT and self._get(key) in (self._get(followed), f"${{{followed}}}"):
                self._take(key)
                self.say("dropped", key, f"evaluation follows {followed}")

    def _lengths(self) -> None:
        """What PipelineRL does not check, or refuses itself: samples that could not be trained or answered."""
        longest, context = self._value("finetune.seq_length"), self._value(_CONTEXT, None)
        if not isinstance(longest, int) or not isinstance(context, int):
            return
        if longest < context:
            self._set(_CONTEXT, longest)
            self.say("changed", _CONTEXT, f"now {longest}, not {context}: finetune.seq_length cannot train more")
            context = longest
        for section in ("llm", "test_llm"):
            key = f"{section}.parameters.max_tokens"
            tokens = self._get(key) if section == "test_llm" else self._value(key)
            if isinstance(tokens, int) and tokens >= context:
                room = max(context - _PROMPT_TOKENS, context // 2)
                self._set(key, room)
                self.say("changed", key, f"now {room}: {tokens} leave no room for a prompt in {_CONTEXT}={context}")

    def _check_references(self, data: Any) -> None:
        """A reference to a key that is gone, or to itself under its new name, would not compose."""
        for key in [*_leaves(data)]:
            text = str(self._get(key))
            names = [found[2] for found in _REFERENCE.finditer(text)]
            if names == [key] and text == f"${{{key}}}":
                self._take(key)
                self.say("dropped", key, "it refers to itself under its new name")
                continue
            if "${hydra:" in text:
                self.fail(key, f"{text}: a run is not Hydra's; write the value")
            for name in names:
                if not is_known(name) and self._get(name) is _ABSENT:
                    self.fail(key, f"{text} refers to {name}, which is not there any more")

    def _drop_foreign_keys(self) -> None:
        """Keys of a loss, estimator, backend, ... that is not the chosen one had no effect."""
        for key in known_keys():
            if not key.chooser:
                continue
            chosen = self._value(key.chooser)
            tag = chosen if chosen in values_of(key.chooser) else DOTTED
            if tag in key.owners:
                continue
            if self._take(key.name) not in (_ABSENT, None):
                self.say("dropped", key.name, f"it has no effect with {key.chooser}={chosen}")
            if value_at(self.inherited, key.name) is not None:
                self._set(key.name, None)
                self.say("changed", key.name, f"now null: what is included has no effect with {key.chooser}={chosen}")

    def _drop_unknown_keys(self) -> None:
        names = [key.name for key in known_keys()]
        for key in [key for key in _leaves(self.data) if not is_known(key)]:
            self._take(key)
            near = nearest_key(key, names)
            self.fail(key, "unknown key" + (f", the nearest is {near}" if near else "; your own settings go to custom"))

    def _rename(self, key: str, new: str) -> None:
        value = self._take(key)
        if value is not _ABSENT:
            self._replace(key, new, value)

    def _replace(self, key: str, new: str, value: Any) -> None:
        old = self._get(new)
        if value == f"${{{new}}}" or (isinstance(value, str) and value.startswith("${") and old is not _ABSENT):
            self.say("dropped", key, f"it is the same setting as {new}")
        elif old is _ABSENT or old == value or (isinstance(old, str) and old.startswith("${")):
            self._set(new, value)
            self.say("changed", key, f"now {new}: {value}")
        else:
            self.fail(key, f"{value!r} contradicts {new}={old!r}, which is the same setting; the latter is kept")

    def say(self, what: str, key: str, text: str) -> None:
        self.lines.append(f"{what} {key}: {text}")

    def fail(self, key: str, text: str) -> None:
        self.failed = True
        self.say("cannot", key, text)

    def _get(self, key: str) -> Any:
        return value_at(self.data, key, _ABSENT)

    def _value(self, key: str, default: Any = _ABSENT) -> Any:
        """What the key is in the end: set here, or in what is included, or its default."""
        for source in (self.data, self.inherited):
            if (value := value_at(source, key, _ABSENT)) is not _ABSENT:
                return value
        if default is not _ABSENT:
            return default
        return default_of(key)

    def _set(self, key: str, value: Any) -> None:
        section = self.data
        *heads, leaf = key.split(".")
        for head in heads:
            if not isinstance(section.get(head), dict):
                section[head] = {}
            section = section[head]
        section[leaf] = value

    def _take(self, key: str) -> Any:
        """Remove a key and return its value; sections that are empty then go too."""
        value = self._get(key)
        if value is not _ABSENT:
            *heads, leaf = key.split(".")
            sections = [self.data]
            for head in heads:
                sections.append(sections[-1][head])
            del sections[-1][leaf]
            for section, head in reversed(list(zip(sections[:-1], heads, strict=True))):
                if not section[head]:
                    del section[head]
        return value


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and is_known(name):
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _mapped(value: Any, change: Callable[[str, tuple[str, ...]], str], place: tuple[str, ...] = ()) -> Any:
    """`value` with `change(text, place)` in place of every text in it."""
    if isinstance(value, dict):
        return {key: _mapped(item, change, (*place, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change, (*place, str(index))) for index, item in enumerate(value)]
    return change(value, place) if isinstance(value, str) else value


def _absolute(text: str, place: tuple[str, ...]) -> str:
    """Interpolations relative to their place name keys from the root; one dot is the section that the key is in."""
    return _REFERENCE.sub(
        lambda found: f"${{{'.'.join((*place[: -len(found[1])], found[2]))}}}" if found[1] else found[0], text
    )


def _renamed(text: str, place: tuple[str, ...]) -> str:
    """Interpolations of renamed keys name the new ones."""
    return _REFERENCE.sub(lambda found: f"${{{RENAMED.get(found[2], found[2])}}}", text)
