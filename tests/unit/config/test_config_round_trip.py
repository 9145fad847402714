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
