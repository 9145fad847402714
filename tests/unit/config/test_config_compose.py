"""Flags, folders of the user, overrides, linked keys, and what the composition returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.compose import ComposedConfig, compose
from pipelinerl.config.run import RunConfig


def run_config(*argv: str) -> RunConfig:
    config = compose([*argv, "output_dir=x"]).config
    assert config is not None
    return config


@pytest.fixture
def user_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "it's mine, really"
    (folder / "finetune").mkdir(parents=True)
    (folder / "my_task.yaml").write_text(
        "defaults:\n  - base\n  - override finetune: small\n  - _self_\n"
        "actor:\n  rollout_policy: my_task.generate_rollout\n"
        "custom:\n  difficulty: 3\n"
        "hydra:\n  run:\n    dir: ${output_dir}\n"
    )
    (folder / "finetune" / "small.yaml").write_text("defaults: [base, _self_]\nlearning_rate: 1e-5\n")
    return folder


@pytest.mark.parametrize("flags", [["--config-name", "guessing"], ["--config-name=guessing"], ["-cn", "guessing"]])
def test_config_name_in_each_spelling(flags: list[str]) -> None:
    assert run_config(*flags).train_dataset_names == ["train"]


@pytest.mark.parametrize("flag", ["--config-dir", "--config-path", "-cd", "-cp"])
def test_a_users_folder_builds_on_the_shipped_files(user_dir: Path, flag: str) -> None:
    composed = compose([flag, str(user_dir), "--config-name", "my_task", "output_dir=x"])
    assert composed.config is not None
    assert composed.config.actor.rollout_policy == "my_task.generate_rollout"
    assert composed.config.custom == {"difficulty": 3}
    assert composed.config.finetune.learning_rate == 1e-5
    assert composed.config.finetune.seq_length == 12000
    assert composed.search_dirs == [user_dir.resolve()]
    assert composed.config_name == "my_task"


def test_a_shipped_configuration_with_a_users_group_file(user_dir: Path) -> None:
    argv = ["--config-dir", str(user_dir), "--config-name=guessing", "finetune=small"]
    assert run_config(*argv).finetune.learning_rate == 1e-5


def test_a_deepspeed_file_of_the_user_becomes_a_path(user_dir: Path) -> None:
    (user_dir / "deepspeed").mkdir()
    (user_dir / "deepspeed" / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    config = run_config("--config-dir", str(user_dir), "--config-name", "my_task", "backend.config=mine")
    assert config.backend.config == str(user_dir.resolve() / "deepspeed" / "mine.json")


def test_overrides_in_each_form() -> None:
    config = run_config(
        "seed=7",
        "+finetune.learning_rate=2e-5",
        "++max_lag=0",
        "vllm_config.vllm_kwargs.enforce-eager=''",
        "~vllm_config.vllm_kwargs.gpu-memory-utilization",
        "train_dataset_names=[a,{name: b, split: c}]",
        "llm.parameters.stop=['</answer>']",
        "streams=redis",
        "wandb.wandb_name=123",
        "finetune.seq_length=2e4",
    )
    assert config.seed == 7
    assert config.finetune.learning_rate == 2e-5
    assert config.max_lag == 0
    assert config.vllm_config.vllm_kwargs["enforce-eager"] == ""
    assert "gpu-memory-utilization" not in config.vllm_config.vllm_kwargs
    assert config.train_dataset_names == ["a", {"name": "b", "split": "c"}]
    assert config.llm.parameters.stop == config.test_llm.parameters.stop == ["</answer>"]
    assert config.streams.backend == "redis"
    assert config.wandb.wandb_name == "123"
    assert config.finetune.seq_length == 20000


def test_a_temperature_reaches_evaluation_and_trainer() -> None:
    config = run_config("llm.parameters.temperature=0.7")
    assert config.test_llm.parameters.temperature == 0.7
    assert config.sampling_temperature == 0.7


def test_a_file_that_does_not_build_on_base(tmp_path: Path) -> None:
    (tmp_path / "alone.yaml").write_text("attempts: 4\nmodel_path: m\n")
    config = run_config("--config-dir", str(tmp_path), "--config-name=alone", "finetune.seq_length=99", "max_lag=1")
    assert (config.attempts, config.finetune.seq_length) == (4, 99)
    assert config.max_lag == 1


def test_help_lists_files_of_user_and_package(user_dir: Path) -> None:
    composed = compose(["--config-dir", str(user_dir), "--help"])
    assert isinstance(composed, ComposedConfig) and composed.config is None and composed.help_text is not None
    for word in (
        "output_dir",
        "quickstart",
        "my_task",
        "streams: files, redis",
        "finetune: base, grpo, gspo, ppo, small",
        "backend: deepspeed, fsdp, plain",
    ):
        assert word in composed.help_text


@pytest.mark.parametrize("flags", [["--cfg"], ["--cfg", "job"], ["--cfg=job", "--resolve"], ["-c", "job"]])
def test_cfg_shows_the_configuration_without_an_output_dir(flags: list[str]) -> None:
    text = compose([*flags, "seed=7"]).help_text
    assert text is not None
    assert "output_dir: ???" in text and "seed: 7" in text


def test_the_shipped_defaults_have_no_notes() -> None:
    assert compose(["output_dir=x"]).notes == []


def test_composing_twice_in_one_process_does_not_interfere() -> None:
    assert run_config("seed=1").seed == 1
    assert run_config("--config-name=guessing").seed == 42
