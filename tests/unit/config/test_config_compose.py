"""Flags, folders of the user, overrides, and what the composition returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError


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
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    return folder


@pytest.mark.parametrize("flags", [["--config-name", "guessing"], ["--config-name=guessing"], ["-cn", "guessing.yaml"]])
def test_config_name_in_each_spelling(flags: list[str]) -> None:
    config = run_config(*flags)
    assert (config.actor.rollout_policy or "").endswith("guessing.generate_guessing_rollout")
    assert (config.seed, run_config("seed=1").seed) == (42, 1)


@pytest.mark.parametrize("suffix", ["", ".yaml"])
def test_a_config_name_may_be_a_path(user_dir: Path, suffix: str) -> None:
    composed = compose([f"--config-name={user_dir / 'my_task'}{suffix}", "output_dir=x"])
    assert composed.config is not None and composed.config.custom == {"difficulty": 3}
    assert composed.search_dirs == [user_dir.resolve()]
    with pytest.raises(ConfigError) as caught:
        compose([f"--config-name={user_dir / 'my_taks'}{suffix}", "output_dir=x"])
    assert caught.value.key == "--config-name" and "my_task" in caught.value.next_step


def test_two_more_batches_may_be_in_flight_unless_it_is_said_otherwise() -> None:
    assert run_config("finetune.gradient_accumulation_passes=96").max_lag == 192
    assert run_config("max_lag=null").max_lag is None and run_config("max_lag=7").max_lag == 7
    assert run_config("schedule=conventional").max_lag is None


@pytest.mark.parametrize("flag", ["--config-dir", "--config-path", "-cd", "-cp"])
def test_a_users_folder_builds_on_the_shipped_files(user_dir: Path, flag: str) -> None:
    composed = compose([flag, str(user_dir), "--config-name", "my_task", "output_dir=x", "backend.config=mine"])
    config = composed.config
    assert config is not None
    assert config.actor.rollout_policy == "my_task.generate_rollout" and config.custom == {"difficulty": 3}
    assert (config.finetune.learning_rate, config.finetune.seq_length) == (1e-5, 12000)
    assert config.backend.config == str(user_dir.resolve() / "deepspeed" / "mine.json")
    assert composed.search_dirs == [user_dir.resolve()]
    assert any(note.startswith("hydra ") for note in composed.notes)


def test_a_shipped_configuration_with_a_users_group_file(user_dir: Path) -> None:
    argv = ["--config-dir", str(user_dir), "finetune=small", "output_dir=x"]
    assert run_config(*argv, "--config-name=guessing").finetune.learning_rate == 1e-5
    assert any("--config-name" in note for note in compose(argv).notes)


@pytest.mark.parametrize(
    ("in_file", "words", "expected"),
    [
        (None, [], {"outcome": 1}),
        (None, ["rewards.components={format: 2}"], {"format": 2}),
        (None, ["rewards.components.format=2"], {"outcome": 1, "format": 2}),
        (None, ["rewards=difficulty_length"], {"outcome": 1, "difficulty_length": 0.5}),
        (None, ["rewards=difficulty_length", "rewards.components={format: 2}"], {"format": 2}),
        ("{format: 2}", [], {"format": 2}),
        ("{format: 2}", ["rewards.components.success=3"], {"format": 2, "success": 3}),
        (
            "{format: 2}",
            ["rewards.components={success: 3}", "rewards.components.format=1"],
            {"success": 3, "format": 1},
        ),
    ],
)
def test_a_users_mapping_of_weights_is_the_whole_mapping(
    user_dir: Path, in_file: str | None, words: list[str], expected: dict[str, float]
) -> None:
    if in_file is not None:
        with (user_dir / "my_task.yaml").open("a") as file:
            file.write(f"rewards:\n  components: {in_file}\n")
    (user_dir / "longer.yaml").write_text("defaults: [my_task, _self_]\nseed: 3\n")
    for name in ("my_task", "longer"):
        assert run_config("-cd", str(user_dir), "-cn", name, *words).rewards.components == expected


@pytest.mark.parametrize("value", ["success_and_format", "null", "{components: success}", "{components: null}"])
def test_rewards_of_another_type_are_refused(user_dir: Path, value: str) -> None:
    with (user_dir / "my_task.yaml").open("a") as file:
        file.write(f"rewards: {value}\n")
    with pytest.raises(ConfigError) as found:
        run_config("-cd", str(user_dir), "-cn", "my_task")
    assert found.value.key.startswith("rewards")


def test_overrides_in_each_form() -> None:
    config = run_config(
        "seed=7",
        "+finetune.learning_rate=2e-5",
        "++max_lag=0",
        "vllm_config.vllm_kwargs.enforce-eager=''",
        "~vllm_config.vllm_kwargs.dtype",
        "train_dataset_names=[a,{name: b, split: c}]",
        "llm.parameters.stop=['</answer>']",
        "llm.parameters.temperature=0.7",
        "streams=redis",
        "wandb.wandb_name=123",
        "finetune.seq_length=2e4",
        "dataset_loader_params=null",
        "model_path=${wandb.wandb_group}a${.seed}${test_llm.parameters.top_p}",
        "wandb.wandb_group=g",
    )
    assert (config.seed, config.finetune.learning_rate, config.max_lag) == (7, 2e-5, 0)
    assert config.vllm_config.vllm_kwargs["enforce-eager"] == ""
    assert "dtype" not in config.vllm_config.vllm_kwargs
    assert config.train_dataset_names == ["a", {"name": "b", "split": "c"}]
    assert config.llm.parameters.stop == config.test_llm.parameters.stop == ["</answer>"]
    assert config.test_llm.parameters.temperature == config.sampling_temperature == 0.7
    assert config.streams.backend == "redis"
    assert (config.wandb.wandb_name, config.finetune.seq_length, config.dataset_loader_params) == ("123", 20000, {})
    assert config.model_path == "ga71.0"


@pytest.mark.parametrize(
    ("word", "expected"), [("llm.parameters.max_tokens=7", 7), ("test_llm.parameters.max_tokens=5", 5)]
)
def test_an_interpolation_may_name_what_follows_training(word: str, expected: int) -> None:
    config = compose(["output_dir=x", word, "custom.tokens=${test_llm.parameters.max_tokens}"]).config
    assert config is not None
    assert config.custom["tokens"] == config.test_llm.parameters.max_tokens == expected


def test_a_file_that_does_not_build_on_base(tmp_path: Path) -> None:
    (tmp_path / "alone.yaml").write_text("attempts: 4\nmodel_path: m\n")
    config = run_config("--config-dir", str(tmp_path), "--config-name=alone", "finetune.seq_length=99", "max_lag=1")
    assert (config.attempts, config.finetune.seq_length, config.max_lag) == (4, 99, 1)


def test_help_lists_files_of_user_and_package(user_dir: Path) -> None:
    composed = compose(["--config-dir", str(user_dir), "--help", "seed=1"])
    assert composed.config is None and composed.help_text is not None
    for word in (
        "output_dir",
        "quickstart",
        "my_task",
        "streams: files, redis",
        "finetune: base, dapo, grpo, gspo, ppo, small",
    ):
        assert word in composed.help_text


def test_a_backend_needs_no_file_in_its_group() -> None:
    assert run_config("--config-name=quickstart", "streams=my_streams.memory").streams.backend == "my_streams.memory"
    with pytest.raises(ConfigError) as refused:
        run_config("--config-name=quickstart", "streams=redsi")
    assert refused.value.key == "streams.backend" and "'redis'" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        run_config("--config-name=quickstart", "world=two_gpuss")
    assert "two_gpus" in str(refused.value)


@pytest.mark.parametrize("flags", [["--cfg"], ["--cfg", "job"], ["--cfg=job", "--resolve"], ["-c", "job"]])
def test_cfg_shows_the_configuration_without_an_output_dir(flags: list[str]) -> None:
    text = compose([*flags, "seed=7"]).help_text
    assert text is not None
    assert "output_dir: ???" in text and "seed: 7" in text
