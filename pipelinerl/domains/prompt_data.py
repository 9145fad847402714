"""Prompts of an agent function (`agent.prompt_data`): rows of a file or a Hugging Face data set."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.domains.data_sets import data_set, read_rows
from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm.chat import for_template
from pipelinerl.llm.tokens import ChatRenderer, load_tokenizer

logger = logging.getLogger(__name__)

DATA_KEY = "agent.prompt_data"


def load_prompts(
    dataset_names: Sequence[str],
    *,
    model_path: str,
    input_key: str = "input",
    label_key: str | None = None,
    apply_chat_template: bool = False,
    prompt_max_len: int | None = None,
    max_samples: int | None = None,
    shares: Mapping[str, float] | None = None,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] = {},
    system_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """Return one problem per row: `{"id", "dataset", "state", "label"}`.

    Args:
        dataset_names: texts as `data_sets.data_set` takes them, in this order; a name may occur more than once.
        model_path: of the tokenizer.
        input_key: column of the prompt: text, or a list of messages.
        label_key: column of the label; None: the label is "".
        apply_chat_template: render the prompt with the model's chat template; text becomes a user message.
        prompt_max_len: longest prompt in tokens; longer ones are dropped, and their number is logged.
        max_samples: limit on the rows of all data sets together; with `shares`, each gets its share of the limit.
        shares: how often the prompts of each data set are drawn, whatever their number; None: all equally often.
        trust_remote_code: for the tokenizer.
        chat_template_kwargs: further arguments of the chat template.
        system_prompt: with `apply_chat_template`, the system message of prompts that have none.

    Raises:
        DomainError: the data cannot be loaded, or a row lacks these columns.
    """
    renderer = ChatRenderer(load_tokenizer(model_path, trust_remote_code=trust_remote_code), chat_template_kwargs)
    problems = []
    drawn = _fractions(dataset_names, shares)
    left = None if drawn else max_samples
    stems: Counter[str] = Counter()
    for name in dataset_names:
        if left == 0:
            logger.warning("%s is not used: the data sets before it have agent.max_samples=%s rows", name, max_samples)
            continue
        stem = Path(name).stem
        stems[stem] += 1
        prefix = stem if stems[stem] == 1 else f"{stem}.{stems[stem]}"
        too_long = 0
        limit = math.ceil(max_samples * drawn[name]) if drawn and max_samples is not None else left
        rows = list(itertools.islice(read_rows(data_set(name, DATA_KEY), DATA_KEY), limit))
        left = left if left is None else left - len(rows)
        for index, row in enumerate(rows):
            where = f"{name}, row {index}"
            state = _state(row, where, input_key, apply_chat_template, renderer, system_prompt)
            if prompt_max_len is not None and len(renderer.encode_prompt(state)) > prompt_max_len:
                too_long += 1
                continue
            label = row.get(label_key, "") if label_key is not None else ""
            if label_key is not None and label_key not in row:
                raise DomainError(_missing("agent.label_key", label_key, where, row))
            problem = {"id": f"{prefix}-{index}", "dataset": name, "state": state, "label": label}
            problems.append({**problem, "domain": name, "share": drawn[name]} if drawn else problem)
        if too_long:
            logger.warning("%s: %d prompts of more than %s tokens are left out", name, too_long, prompt_max_len)
    return problems


def _fractions(dataset_names: Sequence[str], shares: Mapping[str, float] | None) -> dict[str, float]:
    """Return the shares of these data sets, scaled to sum to 1; empty if they have none (held-out data)."""
    if shares is None or set(dataset_names) != set(shares):
        return {}
    total = math.fsum(shares.values())
    return {name: shares[name] / total for name in dataset_names}


def _state(
    row: dict[str, Any],
    where: str,
    input_key: str,
    apply_chat_template: bool,
    renderer: ChatRenderer,
    system_prompt: str | None,
) -> str:
    if input_key not in row:
        raise DomainError(_missing("agent.input_key", input_key, where, row))
    value = row[input_key]
    if not apply_chat_template:
        if isinstance(value, str):
            return value
        raise DomainError(
            f"{DATA_KEY}: {where}: {input_key!r} is a {type(value).__name__}, expected text. "
            "Set agent.apply_chat_template=true for lists of messages."
        )
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise DomainError(f"{DATA_KEY}: {where}: {input_key!r} is neither text nor a list of messages.")
    if system_prompt and messages[0].get("role") not in ("system", "developer"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        return renderer.render_text([for_template(message) for message in messages])
    except RolloutError as error:
        raise DomainError(f"{DATA_KEY}: {where}: {error}") from error


def _missing(key: str, column: str, where: str, row: dict[str, Any]) -> str:
    return f"{key}: got {column!r}, but {where} has the columns {sorted(row)}. Name one of them."
