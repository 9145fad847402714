"""Every file that comes with the package composes, validates, and names only keys that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose, compose_plain
from pipelinerl.config.key_table import GROUPS
from pipelinerl.config.load import conf_dir, config_names, find_deepspeed_file
from pipelinerl.config.resources import PlainSettings, VLLMConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.config.validate import EXPERIMENTS, missing_task
from pipelinerl.errors import ConfigError

NAMES = config_names(conf_dir())
CHOICES = [(group, name) for group in GROUPS for name in config_names(conf_dir() / group)]
# Files that others start from, and the one that waits for an agent function.
WITHOUT_TASK = [name for name in NAMES if name in ("agent", "base", "base_cpu")]


def run_config(*argv: str) -> RunConfig:
    config = compose([*argv, "output_dir=results/x"]).config
    assert config is not None
    return config


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_composes_and_an_experiment_has_a_task_and_no_remarks(name: str) -> None:
    composed = compose(["--config-name", name, "output_dir=results/x"])
    assert composed.config is not None and composed.config.output_dir == "results/x"
    fault = missing_task(composed.config)
    if name not in WITHOUT_TASK:
        assert fault is None and composed.notes == []
        return
    assert fault is not None and all(experiment in str(fault) for experiment in EXPERIMENTS)
    assert any(str(fault) in note for note in composed.notes)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_of_a_group_composes(group: str, name: str) -> None:
    notes = compose([f"{group}={name}", "output_dir=results/x"]).notes
    assert group != "finetune" or notes == []


def test_the_shipped_names() -> None:
    assert {"arithmetic_2gpu", "base_4gpu", "guessing", "quickstart", "two_servers_two_ranks"} <= set(NAMES)
    assert set(EXPERIMENTS) <= set(NAMES) - set(WITHOUT_TASK)


def test_the_files_hold_only_what_differs_from_the_defaults() -> None:
    changed = RunConfig.model_validate({**compose_plain("base").data, "output_dir": "x"})
    assert changed.model_copy(update={"backend": PlainSettings(), "vllm_config": VLLMConfig()}) == RunConfig(
        output_dir="x"
    )


def test_four_gpus_are_two_and_two_on_the_default_experiment() -> None:
    four, default = run_config("--config-name", "base_4gpu"), run_config()
    world = four.world
    assert (world.actor_fraction, world.finetune_fraction, world.preprocessor_fraction) == (2, 2, 0)
    assert four.actor == default.actor and four.train_dataset_names == default.train_dataset_names


def test_the_default_experiment_is_math_and_needs_no_data_set() -> None:
    config = run_config()
    assert config == run_config("--config-name=math")
    assert config.actor.rollout_policy == "pipelinerl.domains.math.generate_math_rollout"
    # Names of sums that are made on the spot.
    assert (config.train_dataset_names, config.test_dataset_names) == (["train"], ["test"])


def test_a_stage_without_rollouts_needs_no_task() -> None:
    assert missing_task(run_config("--config-name=base", "debug.mode=preprocessor", "debug.streams_from=y")) is None


def test_base_cpu_has_sizes() -> None:
    config = run_config("--config-name", "base_cpu")
    assert (config.world.device, config.backend.type, config.max_lag) == ("cpu", "plain", 64)
    assert config.finetune.samples_per_step == 64


def test_two_servers_two_ranks_is_the_quickstart_but_for_the_counts() -> None:
    one, two = run_config("--config-name=quickstart"), run_config("--config-name=two_servers_two_ranks")
    assert (one.world.device, two.world.num_actor_llms, two.world.num_finetune_ranks) == ("auto", 2, 2)
    assert two.model_copy(update={"world": one.world}) == one


@pytest.mark.parametrize("path", sorted((conf_dir() / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_say_what_their_names_say(path: Path) -> None:
    data = json.loads(path.read_text())
    stage = int(path.stem.removeprefix("deepspeed_stage")[0])
    assert data["zero_optimization"]["stage"] == stage
    assert data["bf16"]["enabled"] == ("bf16" in path.stem)
    assert ("offload_optimizer" in data["zero_optimization"]) == path.stem.endswith("offload")


def test_a_deepspeed_file_is_a_name_or_a_path(tmp_path: Path) -> None:
    assert find_deepspeed_file("deepspeed_stage2_bf16") == conf_dir() / "deepspeed" / "deepspeed_stage2_bf16.json"
    own = tmp_path / "own.json"
    own.write_text("{}")
    assert find_deepspeed_file(str(own)) == own
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "mine.json").write_text("{}")
    assert find_deepspeed_file("mine", [tmp_path]).parent.parent == tmp_path
    with pytest.raises(ConfigError, match="deepspeed_stage3_bf16"):
        find_deepspeed_file("deepspeed_stage3")
