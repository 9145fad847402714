"""Training that starts from an adapter: what the adapter says is taken over, and what contradicts it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.model_folder import save_adapter_folder, save_model_folder

from pipelinerl.config import RunConfig
from pipelinerl.config.compose import compose
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.config.load import load_config, save_config
from pipelinerl.errors import ConfigError
from pipelinerl.run.model_folder import check_model

KEY = "finetune.lora.adapter_path"


def composed(folder: Path, *words: str) -> RunConfig:
    config = compose(["output_dir=x", "finetune.lora.enabled=true", f"{KEY}={folder}", *words]).config
    assert config is not None
    return config


def refusal(folder: Path, *words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        composed(folder, *words)
    return caught.value


def test_rank_alpha_and_layers_are_the_adapters_also_after_it_is_gone(tmp_path: Path) -> None:
    folder = save_adapter_folder(tmp_path / "adapter")
    lora = composed(folder, "finetune.lora.r=8", "finetune.lora.target_modules=[q_proj,v_proj]").finetune.lora
    assert lora == LoraConfig(
        enabled=True, r=8, alpha=24, target_modules=["q_proj", "v_proj"], adapter_path=str(folder)
    )
    saved = save_config(composed(folder), tmp_path / "config.yaml")
    (folder / "adapter_config.json").unlink()
    assert load_config(saved).finetune.lora == lora


def test_a_pattern_of_layers_is_left_to_peft(tmp_path: Path) -> None:
    folder = save_adapter_folder(tmp_path, target_modules=r".*\.(q|v)_proj")
    assert composed(folder).finetune.lora.target_modules == []


@pytest.mark.parametrize(
    ("word", "wanted"),
    [("r=16", "8"), ("r=4", "8"), ("alpha=1", "24"), ("bias=all", "none"), ("target_modules=[q_proj]", "v_proj")],
)
def test_a_contradiction_names_both_values(tmp_path: Path, word: str, wanted: str) -> None:
    """Also the value that is the default of its key (16), if the command line has it."""
    error = refusal(save_adapter_folder(tmp_path), f"finetune.lora.{word}")
    key, _, value = word.partition("=")
    assert error.key == f"finetune.lora.{key}"
    assert value.strip("[]") in str(error.got) and wanted in error.expected


@pytest.mark.parametrize(
    "content",
    [
        {"peft_type": "IA3"},
        {"r": None},
        {"r": 0},
        {"lora_alpha": -1},
        {"bias": "some"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
    ],
)
def test_what_is_no_plain_adapter_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    assert refusal(save_adapter_folder(tmp_path, **content)).key == KEY


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_lacks_a_file(tmp_path: Path, name: str) -> None:
    save_adapter_folder(tmp_path)
    (tmp_path / name).unlink()
    assert name in refusal(tmp_path).expected
    (tmp_path / "adapter_config.json").write_text("{")
    assert refusal(tmp_path).key == KEY


@pytest.mark.parametrize("word", ["finetune.lora.enabled=false", "finetune.rl.kl_coef=0.1"])
def test_full_training_and_kl_start_from_a_merged_model(tmp_path: Path, word: str) -> None:
    error = refusal(save_adapter_folder(tmp_path), word)
    assert error.key == KEY
    assert "merge_and_unload" in error.next_step and str(tmp_path) in error.next_step


def test_a_model_path_that_is_an_adapter(tmp_path: Path) -> None:
    folder = save_adapter_folder(tmp_path / "adapter")
    config = RunConfig.model_validate({"output_dir": "x", "model_path": str(folder)})
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert caught.value.key == "model_path" and f"{KEY}={folder}" in caught.value.next_step
    save_model_folder(folder)
    assert check_model(config) == []
