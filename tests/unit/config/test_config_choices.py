"""Choices between types: each brings its own keys and defaults, and a key of another one cannot be set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from pipelinerl.config import RunConfig, load_config, save_config, to_dictconfig
from pipelinerl.config.algorithm import CustomAdvantage, CustomLoss, GspoLoss, RLConfig
from pipelinerl.config.compose import compose
from pipelinerl.config.keys import Key, keys_of, known_keys, values_of
from pipelinerl.config.resources import (
    CustomStreams,
    DeepSpeedSettings,
    FileStreams,
    FSDPSettings,
    PlainSettings,
    RedisStreams,
    StreamsConfig,
)
from pipelinerl.config.run import ConventionalSchedule
from pipelinerl.config.section import DOTTED, Choice, FlatSection
from pipelinerl.errors import ConfigError

CHOOSERS = [key for key in known_keys() if key.choice is not None]


def config(**values: object) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", **values})


def composed(*words: str) -> RunConfig:
    found = compose(["output_dir=x", *words]).config
    assert found is not None
    return found


@pytest.mark.parametrize("key", CHOOSERS, ids=lambda key: key.name)
def test_every_type_can_be_chosen_and_reloads_equal(key: Key, tmp_path: Path) -> None:
    for tag in values_of(key.name):
        data: Any = tag
        for part in reversed(key.name.split(".")):
            data = {part: data}
        made = config(**data)
        assert load_config(save_config(made, tmp_path / "exp.yaml")) == made


def test_a_loss_brings_its_own_defaults() -> None:
    gspo = composed("finetune.rl.policy_loss=gspo").finetune.rl
    assert gspo.loss == GspoLoss(epsilon_low=3e-4, epsilon_high=4e-4)
    assert RLConfig(policy_loss="ppo").loss.epsilon_low == 0.2
    assert RLConfig(advantage_estimator="grpo").divides_by_std and not RLConfig().divides_by_std
    changed = composed("finetune=gspo", "finetune.rl.epsilon_low=0.001").finetune.rl
    assert (changed.loss.epsilon_low, changed.loss.epsilon_high, changed.advantage_estimator) == (0.001, 4e-4, "grpo")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["finetune.rl.epsilon_low=0.1"], "finetune.rl.epsilon_low"),
        (["finetune.rl.policy_loss=cispo", "finetune.rl.dual_clip=3"], "finetune.rl.dual_clip"),
        (["finetune=ppo", "finetune.rl.normalize_reward=true"], "finetune.rl.normalize_reward"),
        (["finetune.rl.value_loss_coef=0.1"], "finetune.rl.value_loss_coef"),
        (["finetune.rl.importance_low=0.1"], "finetune.rl.importance_low"),
        (["backend=plain", "backend.config=x"], "backend.config"),
        (["backend.param_dtype=bf16"], "backend.param_dtype"),
        (["streams.url=redis://localhost:1/0"], "streams.url"),
        (["schedule=concurrent", "steps_per_generation=4"], "steps_per_generation"),
        (["schedule=conventional", "max_lag=4"], "max_lag"),
        (["schedule=conventional", "lag_policy=fixed"], "lag_policy"),
        (["finetune.rl.policy_loss=my.loss", "finetune.rl.epsilon_low=0.1"], "finetune.rl.epsilon_low"),
        (["streams=my.kafka", "streams.url=redis://localhost:1/0"], "streams.url"),
        (["world.sleep_level=1"], "world.sleep_level"),
    ],
)
def test_a_key_of_another_type_is_refused_by_name(words: list[str], key: str) -> None:
    (found,) = [each for each in known_keys() if each.name == key]
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    assert caught.value.key == key and found.chooser in caught.value.expected
    assert all(owner in caught.value.expected for owner in found.owners)
    chosen = [word.partition("=")[2] for word in words[:-1]]
    assert all(f"={name}" in caught.value.expected for name in chosen if "." in name)


def test_plug_ins_without_a_type_are_listed_with_the_types() -> None:
    class Others(FlatSection):
        streams: Annotated[StreamsConfig, Choice("backend", names=("files", "memory"))] = FileStreams()

    (first, *_) = keys_of(Others)
    assert first.name == "streams.backend" and set(first.choice or ()) == {"files", "redis", "memory", DOTTED}


@pytest.mark.parametrize("key", CHOOSERS, ids=lambda key: key.name)
def test_an_unknown_type_is_refused_with_the_names(key: Key) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(f"++{key.name}=nonsense")
    assert (caught.value.key, caught.value.got) == (key.name, "nonsense")
    assert all(name in caught.value.expected for name in values_of(key.name))


def test_null_leaves_a_key_of_another_type_unset() -> None:
    rounds = composed("--config-name=quickstart", "schedule=conventional", "steps_per_generation=4", "max_lag=null")
    assert rounds.pacing == ConventionalSchedule(steps_per_generation=4)
    assert (rounds.schedule, rounds.max_lag, rounds.steps_per_generation) == ("conventional", None, 4)


def test_the_backend_is_one_choice() -> None:
    assert composed().backend == DeepSpeedSettings(config="deepspeed_stage3_bf16")
    assert composed("--config-name=quickstart").backend == PlainSettings()
    assert composed("backend=fsdp", "backend.param_dtype=bf16").backend == FSDPSettings(param_dtype="bf16")
    assert config(backend="fsdp").backend == FSDPSettings()


def test_functions_and_modules_of_the_user_are_dotted_paths() -> None:
    rl = RLConfig(policy_loss="my.losses.mine", loss_params={"scale": 2}, advantage_estimator="my.f")
    assert (rl.loss, rl.advantage) == (
        CustomLoss(policy_loss="my.losses.mine", loss_params={"scale": 2}),
        CustomAdvantage(advantage_estimator="my.f"),
    )
    streams = config(streams={"backend": "my.kafka", "options": {"hosts": ["a"]}}).streams
    assert streams == CustomStreams(backend="my.kafka", options={"hosts": ["a"]})
    with pytest.raises(ValidationError):
        RLConfig(policy_loss="mine")


def test_user_code_sees_flat_keys_and_null_for_those_of_other_types() -> None:
    cfg = to_dictconfig(composed("finetune=gspo", "schedule=conventional", "streams=redis"))
    assert (cfg.finetune.rl.policy_loss, cfg.finetune.rl.epsilon_low) == ("gspo", 3e-4)
    assert (cfg.schedule, cfg.steps_per_generation, cfg.max_lag, cfg.finetune.rl.clamp) == (
        "conventional",
        1,
        None,
        None,
    )
    assert cfg.streams.backend == "redis" and isinstance(composed("streams=redis").streams, RedisStreams)
    for key in known_keys():
        section = cfg
        for part in key.name.split("."):
            assert part in section, key.name
            section = section[part]


def test_evaluation_samples_like_training_unless_told_otherwise() -> None:
    parameters = {"temperature": 0.7, "max_tokens": 9, "stop": ["x"]}
    same = config(llm={"parameters": parameters}).test_llm.parameters
    assert (same.temperature, same.max_tokens, same.stop, same.top_p) == (0.7, 9, ["x"], 1)
    other = config(llm={"parameters": parameters}, test_llm={"parameters": {"temperature": 0}}).test_llm.parameters
    assert (other.temperature, other.max_tokens) == (0, 9)
