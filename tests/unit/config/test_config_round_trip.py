"""What is saved reloads equal, and reaches user code unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipelinerl.config import RunConfig, load_config, save_config, to_dictconfig
from pipelinerl.config.compose import compose
from pipelinerl.errors import ConfigError

ODD = [
    *("null", "~", "1e-3", "1.0", "0x1F", "yes", "no", "${x}", r"\${x}", r"a\\${x}", "", " ", "2020-01-01", "1_000"),
    *(".inf", "nan", "'", '"', "a: b", "#c", "- d", "line\nbreak", "tab\t", "é", "\x85", "{", "[", "*a", "&a", "!t"),
    *("???", "0o7", "12:30"),
]


def full(**values: object) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", **values})


def test_o3_odd_strings_reload_equal_and_reach_user_code(tmp_path: Path) -> None:
    for text in ODD:
        custom = {"value": text, "list": [text, None, {"deep": text}]}
        config = full(model_path=text, custom=custom, train_dataset_names=[text])
        assert load_config(save_config(config, tmp_path / "conf" / "exp.yaml")) == config
        if text != "???":  # OmegaConf's own mark for a missing value
            cfg = to_dictconfig(config)
            assert (cfg.model_path, cfg.custom.value, cfg.custom.list[2].deep) == (text, text, text)
            assert cfg.custom.list[1] is None
    assert [path.name for path in (tmp_path / "conf").iterdir()] == ["exp.yaml"]


@pytest.mark.parametrize("name", ["base", "guessing", "quickstart"])
def test_o3_composed_configurations_reload_equal(tmp_path: Path, name: str) -> None:
    config = compose(["--config-name", name, "output_dir=x", "finetune.gradient_clipping_threshold=null"]).config
    assert config is not None
    assert load_config(save_config(config, tmp_path / "exp.yaml")) == config


def test_o3_numbers_and_nulls_keep_their_types(tmp_path: Path) -> None:
    values = {"a": 1, "b": 1.0, "c": None, "d": True, "e": 1e-6, "f": [1, "1"], "g": {}, "h": 10**20, "i": {1: "x"}}
    again = load_config(save_config(full(custom=values), tmp_path / "exp.yaml"))
    assert again.custom == values
    assert [type(again.custom[key]) for key in "abcde"] == [type(values[key]) for key in "abcde"]


def saved_with(folder: Path, *former: tuple[str, object]) -> Path:
    """The file of a run, with keys that the schema does not have any more."""
    file = save_config(full(custom={"verifier": {"max_queue": 1}}), folder / "exp.yaml")
    data = yaml.safe_load(file.read_text())
    for key, value in former:
        *heads, leaf = key.split(".")
        section = data
        for head in heads:
            section = section[head]
        section[leaf] = value
    file.write_text(yaml.safe_dump(data))
    return file


def test_a_saved_configuration_loads_without_former_keys_that_ask_for_nothing(tmp_path: Path) -> None:
    file = saved_with(
        tmp_path,
        ("actor.throughput_window_size", 50),
        ("actor.log_each_n_secs", 0.0),
        ("actor.min_rollouts_for_failure_rate", 32),
        ("preprocess.chunk_n_groups", 2),
        ("finetune.rl.clamp_log_ratio_ref_new_value", 5.0),
        ("finetune.reentrant_checkpointing", False),
        ("finetune.log_each_n_steps", 1),
        ("finetune.send_weight_updates", True),
        ("vllm_config.quantization", None),
        ("rewards.name", "pure_success"),
        ("verifier.queue_timeout_s", 300.0),
        ("verifier.max_queue", 8192),
        ("supervise.server_restart_window_s", 3600.0),
        ("wandb.wandb_resume", "allow"),
        ("wandb.wandb_use_basename", True),
        ("wandb.wandb_workspace_root", "results"),
        ("wandb.wandb_dir", None),
        ("tensorboard.folder", None),
        ("vllm_config.vllm_kwargs.tool-call-parser", "hermes"),  # below a mapping whose keys are the user's
    )
    kept = {"vllm_kwargs": {"tool-call-parser": "hermes"}}
    assert load_config(file) == full(custom={"verifier": {"max_queue": 1}}, vllm_config=kept)


@pytest.mark.parametrize(
    ("key", "value"),
    [("finetune.send_weight_updates", False), ("vllm_config.quantization", "fp8"), ("actor.nonsense", 1)],
)
def test_a_saved_configuration_with_another_unknown_key_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(saved_with(tmp_path, (key, value)))
    assert (caught.value.key, caught.value.got) == (key, value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking through the YAML reader takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=values)
def test_o3_any_plain_value_reloads_equal(tmp_path: Path, value: object) -> None:
    config = full(custom={"value": value})
    assert load_config(save_config(config, tmp_path / "exp.yaml")) == config


def test_a_missing_a_damaged_and_a_foreign_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the resolved configuration of a run"):
        load_config(tmp_path / "none.yaml")
    damaged = tmp_path / "damaged.yaml"
    damaged.write_text("a: [")
    with pytest.raises(ConfigError, match="damaged"):
        load_config(damaged)
    damaged.write_text("3")
    with pytest.raises(ConfigError, match="a mapping of keys"):
        load_config(damaged)
    damaged.write_text(yaml.safe_dump({"output_dir": "x", "sed": 3}))
    with pytest.raises(ConfigError, match="the nearest is seed"):
        load_config(damaged)
