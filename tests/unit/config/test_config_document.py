"""docs/configuration.md is complete, up to date, and true: a configuration composes with each key in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.document import renew
from pipelinerl.config.key_notes import HONOURED, NO_EFFECT, REFUSED, REFUSED_VALUES
from pipelinerl.config.keys import default_of, known_keys
from pipelinerl.config.retired import RETIRED_KEYS
from pipelinerl.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
# User code reads these from its cfg.
FOR_USER_CODE = re.compile(
    r"custom|environment|sandbox_endpoint|rewards\..*|actor\.(system_prompt|task_template|task_prompt|discount_factor)"
)
# Read by the configuration itself: twins of other keys, and factors of `samples_per_step`.
IN_CONFIG_ONLY = re.compile(
    r"finetune\.(max_lag|attempts|pop_old_data|force_restart|gradient_accumulation_passes"
    r"|rl\.temperature|interrupt_train_steps)"
    r"|preprocess\.pop_old_data|attempts"
    # Settled into dataset_loader_params and the names of the data sets.
    r"|agent\.(prompt_data|prompt_data_probs|eval_data|input_key|label_key|apply_chat_template|prompt_max_len|max_samples)"
)
# Values that each refused key does not take. Those with None are refused by the launcher, which still plans them.
REFUSED_WORDS: dict[str, str | None] = {
    "finetune.seq_parallel": "2",
    "finetune.lora.base_model_8bit": "true",
    "finetune.lora.base_model_4bit": "true",
    "llm.parameters.top_p": "0.9",
    "llm.parameters.top_k": "5",
    "finetune.optim": "lion",
    "finetune.objective": "sft",
    "finetune.rl.aggregate_loss": "mean",
    "world.replicas": "2",
    "debug.use_existing_llms": None,
}
# Required, bound to another key, and merged with what base.yaml says.
SET_ELSEWHERE = ("output_dir", "finetune.rl.temperature", "vllm_config.vllm_kwargs")


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
    noted = [*HONOURED, *NO_EFFECT, *REFUSED]
    assert sorted(noted) == sorted(known_keys())
    assert set(REFUSED_VALUES) <= set(HONOURED)


def test_refused_keys_are_refused() -> None:
    assert set(REFUSED_WORDS) == set(REFUSED)
    for key, value in REFUSED_WORDS.items():
        if value is not None:
            with pytest.raises(ConfigError, match=f"^{re.escape(key)}: got "):
                compose(["output_dir=x", f"{key}={value}"])


def test_retired_keys_are_not_in_the_schema() -> None:
    assert not {retired.key for retired in RETIRED_KEYS} & set(known_keys())


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


def test_keys_that_do_nothing_give_the_note_of_the_page() -> None:
    idle = [retired for retired in RETIRED_KEYS if retired.replacement is None]
    notes = compose(["output_dir=x", *(f"{retired.key}=[7]" for retired in idle)]).notes
    assert notes == [f"{retired.key} does nothing here: {retired.note}" for retired in idle]


def test_refused_keys_name_the_replacement_of_the_page() -> None:
    refused = [retired for retired in RETIRED_KEYS if retired.replacement is not None]
    with pytest.raises(ConfigError) as caught:
        compose(["output_dir=x", *(f"{retired.key}=[7]" for retired in refused)])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(refused)
    for line, retired in zip(lines, refused, strict=True):
        assert line.startswith(f"{retired.key}: got [7], expected {retired.replacement} instead")


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
