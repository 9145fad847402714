"""Refuses options that vLLM's server does not have, by reading vLLM's files instead of importing them.

Called by the launcher's checks: vLLM itself says so only half a minute after a start. Waits for nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from pipelinerl.errors import ConfigError

# Options are written out, or made of the fields of classes; whatever looks like either is taken for one.
_FILES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
_WRITTEN = re.compile(r"""["']--([a-z0-9][a-z0-9_-]*)["']""")
_FIELD = re.compile(r"^    ([a-z][a-z0-9_]*)\s*:", re.MULTILINE)
# With fewer, this vLLM keeps its options somewhere else, and nothing is known.
_FEWEST = 150


def check_names(options: Iterable[str]) -> None:
    """Refuse names that are no option of the installed vLLM.

    Args:
        options: with dashes; what stands behind a dot is a field of the option, which is vLLM's to check.

    Raises:
        ConfigError: names the nearest option.
    """
    known = vllm_option_names()
    if len(known) < _FEWEST:
        return
    for name in options:
        option = name.partition(".")[0]
        if option in known or option.removeprefix("no-") in known:
            continue
        near = get_close_matches(option, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Remove it."
        raise ConfigError(
            f"vllm_config.vllm_kwargs.{name}", name, "an option of vLLM's server (`vllm serve --help=all`)", hint
        )


def vllm_option_names() -> set[str]:
    """The options of the installed vLLM with dashes, and a few words that are none; empty without vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    names: set[str] = set()
    for file in (Path(spec.origin).parent / name for name in _FILES):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            names.update(found.replace("_", "-") for pattern in (_WRITTEN, _FIELD) for found in pattern.findall(text))
    return names
