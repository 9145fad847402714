"""docs/configuration.md is complete, up to date, and true: a configuration composes with each key in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.convert import DROPPED, RENAMED, UNSUPPORTED
from pipelinerl.config.document import renew
from pipelinerl.config.key_notes import HONOURED, REFUSED_VALUES
from pipelinerl.config.keys import default_of, known_keys
from pipelinerl.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
# User code reads these from its cfg.
FOR_USER_CODE = re.compile(
    r"custom|environment|sandbox_endpoint|rewards\..*|actor\.(system_prompt|task_template|task_prompt|discount_factor)"
)
# Read by the configuration itself: twins of other keys, and factors of `samples_per_step`.
IN_CONFIG_ONLY = re.compile(
    r"finetune\.(gradient_accumulation_passes|interrupt_train_steps)|attempts"
    # Settled into dataset_loader_params and the names of the data sets.
    r"|agent\.(prompt_data|prompt_data_probs|eval_data|input_key|label_key|apply_chat_template|prompt_max_len|max_samples)"
)
# Required, bound to another key, and merged with what base.yaml says.
SET_ELSEWHERE = ("output_dir", "vllm_config.vllm_kwargs")


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renew(text) == text, "run python -m pipelinerl.config.document docs/configuration.md"


def test_the_page_names_every_file_of_the_package() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shipped = {path.stem for path in (ROOT / "conf").glob("*.yaml")}
    assert {name for name in shipped if f"| `{name}` |" not in text} == set()
    for group in ("finetune", "rewards", "streams", "world"):
        (row,) = re.findall(rf"\| `{group}` \| (`.*`) \|", text)
        assert set(re.findall(r"`(\w+)`", row)) == {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_every_key_has_one_note() -> None:
    assert sorted(HONOURED) == sorted(known_keys())
    assert set(REFUSED_VALUES) <= set(HONOURED)


def test_keys_of_pipelinerl_that_are_gone_are_unknown_with_a_word_on_their_fate() -> None:
    gone = [*DROPPED, *RENAMED, *UNSUPPORTED]
    assert not set(gone) & set(known_keys()) and set(RENAMED.values()) <= set(known_keys())
    for key in gone:
        if not key.startswith("hydra"):
            with pytest.raises(ConfigError) as caught:
                compose(["output_dir=x", f"{key}=7"])
            assert caught.value.key == key and "pipelinerl convert" in caught.value.next_step


def _word(key: str) -> str:
    """Return an override that sets `key` to its own default."""
    value = default_of(key)
    if value is None:
        return f"{key}=null"
    if isinstance(value, str):
        return f"{key}='{value}'"
    if isinstance(value, dict):
        return f"{key}={value}".replace("'", "")
    return f"{key}={value}".lower() if isinstance(value, bool) else f"{key}={value}"


def test_a_configuration_composes_with_each_key() -> None:
    words = [_word(key) for key in known_keys() if key not in SET_ELSEWHERE]
    config = compose(["output_dir=x", *words]).config
    assert config is not None
    for key in known_keys():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if key not in SET_ELSEWHERE:
            assert value == default_of(key), key


def test_keys_that_are_called_honoured_are_read_somewhere() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "pipelinerl").rglob("*.py")
        if "config" not in path.relative_to(ROOT / "pipelinerl").parts[:1]
    )
    unread = [
        key
        for key in HONOURED
        if not FOR_USER_CODE.fullmatch(key)
        and not IN_CONFIG_ONLY.fullmatch(key)
        and not re.search(rf"\.{key.rpartition('.')[2]}\b|['\"]{key.rpartition('.')[2]}['\"]", source)
    ]
    assert unread == []
