"""docs/configuration.md is complete and up to date, and every key is read somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.former_keys import DROPPED, RENAMED, REWRITTEN, VALUES
from pipelinerl.config.key_table import GROUPS, help_text, renew
from pipelinerl.config.keys import is_known, known_keys
from pipelinerl.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
# User code reads these from its cfg.
FOR_USER_CODE = re.compile(
    r"custom|environment|sandbox_endpoint|rewards\..*|streams\.options"
    r"|actor\.(system_prompt|task_template|discount_factor)|finetune\.rl\.loss_params"
)
# Read by properties of the configuration itself, or settled into other keys by the composition.
IN_CONFIG_ONLY = re.compile(
    r"finetune\.(gradient_accumulation_passes|interrupt_train_steps|weight_update_interval)|attempts|steps_per_generation"
    r"|finetune\.rl\.(divide_advantage_by_std|normalize_reward|filter_zero_advantage_groups)"
    r"|agent\.(prompt_data|prompt_data_probs|eval_data|input_key|label_key|apply_chat_template|prompt_max_len|max_samples)"
)


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renew(text) == text, "run python scripts/document.py"


def test_every_key_is_described() -> None:
    assert [key.name for key in known_keys() if not key.field.description] == []


def test_the_page_names_every_file_of_the_package() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shipped = {path.stem for path in (ROOT / "conf").glob("*.yaml")}
    assert {name for name in shipped if f"| `{name}` |" not in text} == set()
    for group in GROUPS:
        (row,) = re.findall(rf"\| `{group}` \| (`.*`) \|", text)
        assert set(re.findall(r"`(\w+)`", row)) == {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_help_of_a_section_has_all_of_its_keys() -> None:
    lines = help_text([], "finetune.rl").splitlines()
    names = [key.name for key in known_keys() if key.name.startswith("finetune.rl.")]
    assert [line.split()[0] for line in lines] == names
    assert "finetune.rl.clamp" in str(compose(["--help", "finetune.rl.clamp"]).help_text)
    with pytest.raises(ConfigError) as caught:
        help_text([], "nonsense")
    assert caught.value.key == "--help"


def test_keys_of_pipelinerl_that_are_gone_are_unknown_with_a_word_on_their_fate() -> None:
    gone = [key for key in (*DROPPED, *RENAMED, *VALUES, *REWRITTEN) if not key.startswith("hydra")]
    names = {key.name for key in known_keys()}
    assert not set(gone) & names and all(is_known(key) for key in RENAMED.values())
    with pytest.raises(ConfigError) as caught:
        compose(["output_dir=x", *(f"{key}=7" for key in gone[:1])])
    assert caught.value.key == gone[0] and "pipelinerl convert" in caught.value.next_step


def test_every_key_is_read_somewhere() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "pipelinerl").rglob("*.py")
        if "config" not in path.relative_to(ROOT / "pipelinerl").parts[:1]
    )
    words = set(re.findall(r"(?<=[.'\"])\w+", source))
    unread = [
        key.name
        for key in known_keys()
        if not FOR_USER_CODE.fullmatch(key.name)
        and not IN_CONFIG_ONLY.fullmatch(key.name)
        and key.name.rpartition(".")[2] not in words
    ]
    assert unread == []
