"""Model folders that lack something or were cut off are refused with the name of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.model_folder import WEIGHTS, save_model_folder

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.run import preflight
from pipelinerl.run.model_folder import notes_on_model


def check(folder: Path, **settings: Any) -> None:
    preflight.check_model(RunConfig.model_validate({"output_dir": "x", "model_path": str(folder), **settings}))


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder, **settings)
    assert caught.value.key == "model_path"
    return str(caught.value)


def test_a_whole_folder(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model")
    check(folder)
    assert notes_on_model(folder, "m") == []


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    check(folder)  # a slow tokenizer may have settings and a vocabulary of another name
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in refusal(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "training_args.bin").write_bytes(b"PK")
    message = refusal(folder)
    assert "no *.safetensors" in message and "LoRA adapter" in message
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    check(folder)


DUMMY = {"vllm_kwargs": {"load-format": "dummy"}}
ALONE, READ = {"mode": "actor"}, {"mode": "preprocessor", "streams_from": "x"}
POOL, KL = {"preprocessor_fraction": 1}, {"rl": {"kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("settings", "readers"),
    [
        ({}, "they are loaded by servers and a trainer. "),
        ({"vllm_config": DUMMY}, "loaded by a trainer whatever their load-format"),
        ({"vllm_config": {"vllm_kwargs": {"load_format": "dummy"}}}, "loaded by a trainer whatever"),
        ({"debug": ALONE}, "loaded by servers. "),
        ({"debug": ALONE, "vllm_config": DUMMY}, None),
        ({"debug": READ}, None),
        ({"debug": READ, "world": POOL, "finetune": KL}, "loaded by servers. "),
        ({"debug": {"mode": "finetune", "streams_from": "x"}}, "loaded by a trainer. "),
    ],
)
def test_weights_are_needed_where_they_are_loaded(
    tmp_path: Path, settings: dict[str, Any], readers: str | None
) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    if readers is None:
        check(folder, **settings)
    else:
        assert readers in refusal(folder, **settings)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in refusal(folder, **settings)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (WEIGHTS[:-1], "it was cut off"),
        (WEIGHTS + b"x", "it was cut off"),
        (WEIGHTS[:40], "its head is cut off"),
        (b"", "it is empty"),
        ((9).to_bytes(8, "little") + b"[1, 2, 3]", "its head cannot be read"),
        ((9).to_bytes(8, "little") + b'{"w": [1}', "its head cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
)
def test_weights_that_are_not_whole(tmp_path: Path, content: bytes, reason: str) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    message = refusal(folder)
    assert reason in message and "model.safetensors" in message


def test_an_index_names_files_that_are_missing(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    names = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "model.safetensors").rename(folder / names["w1"])
    message = refusal(folder)
    assert "2 files, of which 1 are missing: model-00002-of-00002.safetensors" in message
    (folder / names["w2"]).write_bytes(WEIGHTS[:-4])
    assert f"{names['w2']}: it has {len(WEIGHTS) - 4} bytes and its head says {len(WEIGHTS)}" in refusal(folder)
    (folder / names["w2"]).write_bytes(WEIGHTS)
    check(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_settings_that_are_cut_off(tmp_path: Path, name: str) -> None:
    folder = save_model_folder(tmp_path)
    (folder / name).write_text('{"a": ')
    message = refusal(folder)
    assert f"{folder / name}: it is no JSON text" in message


def test_a_chat_template_that_is_missing_is_a_note(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    check(folder)
    (note,) = notes_on_model(folder, "m")
    assert "m has no chat template" in note
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert notes_on_model(folder, "m") == []
    assert notes_on_model(folder / "no", "a/b") == []
