"""Prompts of an agent function: rows of a file or of a Hugging Face data set become `state` and `label`.

`load_prompts` is the dataset loader of a run with `agent.prompt_data`, called by the actor and by the check before a
run. Reads files; `datasets` may go to the network.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm.chat_messages import for_template
from pipelinerl.llm.tokens import ChatRenderer, load_tokenizer

logger = logging.getLogger(__name__)

DATA_KEY = "agent.prompt_data"
_DEFAULT_SPLIT = "train"


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
) -> list[dict[str, Any]]:
    """Return one problem a row: `{"id", "dataset", "state", "label"}`.

    Args:
        dataset_names: JSONL files (`.jsonl`, `.json`), or names of Hugging Face data sets, `name:split` for another
            split than `train`. They follow one another; a name may be there more than once.
        model_path: of the tokenizer.
        input_key: column of the prompt: text, or a list of messages.
        label_key: column of the label; None: the label is "".
        apply_chat_template: write the prompt as the model's chat template does; a text is a message of the user.
        prompt_max_len: longest prompt in tokens; longer ones are left out, and their number is logged.
        max_samples: rows taken from the beginning of all data sets together, or with `shares` each one's share of them.
        shares: how often the prompts of each data set are drawn, whatever their numbers; None: all equally often.
        trust_remote_code: for the tokenizer.

    Raises:
        DomainError: the data cannot be had, or a row does not have these columns.
    """
    renderer = ChatRenderer(load_tokenizer(model_path, trust_remote_code=trust_remote_code))
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
        rows = list(islice(_rows(name), limit))
        left = left if left is None else left - len(rows)
        for index, row in enumerate(rows):
            where = f"{name}, row {index}"
            state = _state(row, where, input_key, apply_chat_template, renderer)
            if prompt_max_len is not None and len(renderer.encode(state)) > prompt_max_len:
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
    """The shares of these data sets, so that they add up to 1; empty if there are none for them (held-out data)."""
    if shares is None or set(dataset_names) != set(shares):
        return {}
    total = math.fsum(shares.values())
    return {name: shares[name] / total for name in dataset_names}


def _state(row: dict[str, Any], where: str, input_key: str, apply_chat_template: bool, renderer: ChatRenderer) -> str:
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
        raise DomainError(f"{DATA_KEY}: {where}: {input_key!r} is no text and no list of messages.")
    try:
        return renderer.render_text([for_template(message) for message in messages])
    except RolloutError as error:
        raise DomainError(f"{DATA_KEY}: {where}: {error}") from error


def _rows(name: str) -> Iterable[dict[str, Any]]:
    file = Path(name).expanduser()
    if file.suffix in (".jsonl", ".json") or file.is_file():
        return _rows_of_file(file)
    return _rows_of_dataset(name)


def _rows_of_file(file: Path) -> Iterable[dict[str, Any]]:
    """Yield the rows of a JSONL file, or of a file with one JSON list."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"{DATA_KEY}: got {str(file)!r}, expected a JSONL file: {error}") from error
    if text.lstrip().startswith("["):
        rows = list(enumerate(_json(text, file, 1), start=1))
    else:
        rows = [(number, _json(line, file, number)) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, row in rows:
        if not isinstance(row, dict):
            raise DomainError(f"{DATA_KEY}: {file}:{number} is a {type(row).__name__}, expected a JSON object.")
        yield row


def _json(text: str, file: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DomainError(f"{DATA_KEY}: {file}:{number} is no JSON: {error}") from error


def _rows_of_dataset(name: str) -> Iterable[dict[str, Any]]:
    path, _, split = name.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise DomainError(
            f"{DATA_KEY}: got {name!r}; data sets by name need the package datasets. Install it "
            "(pip install pipelinerl[math]), or give a JSONL file."
        ) from error
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(path, split=split or _DEFAULT_SPLIT)
        return rows
    except Exception as error:  # its errors for "not there", "no network" and "no such split" have no common base
        raise DomainError(
            f"{DATA_KEY}: got {name!r}, expected a JSONL file or a Hugging Face data set (name, or name:split); "
            f"loading it failed: {type(error).__name__}: {error}"
        ) from error


def _missing(key: str, column: str, where: str, row: dict[str, Any]) -> str:
    return f"{key}: got {column!r}, but {where} has the columns {sorted(row)}. Name one of them."
