"""A model that is incomplete, or that the servers cannot run as configured, is refused before anything starts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fakes.model_folder import WEIGHTS, save_model_folder

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.run.model_folder import check_adapter, check_context, check_model, check_parallel_size


def config(model_path: object, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", "model_path": str(model_path), **changes})


def with_options(model_path: object, **options: Any) -> RunConfig:
    return config(model_path, vllm_config={"vllm_kwargs": options})


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(config(folder, **changes))
    assert caught.value.key == "model_path"
    return caught.value.expected


def write_config(folder: Path, **content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_complete_folder_and_one_without_chat_template(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    assert check_model(config(folder)) == []
    (folder / "tokenizer_config.json").write_text("{}")
    assert len(check_model(config(folder))) == 1
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert check_model(config(folder)) == []


def test_a_folder_or_name_that_is_no_model(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    for missing in (tmp_path / "no", "./no", "no such name", "a/b/c"):
        refusal(missing)  # type: ignore[arg-type]


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    check_model(config(folder))  # a slow tokenizer may have settings and a vocabulary of another name
    (folder / "tokenizer_config.json").unlink()
    assert "tokenizer.json" in refusal(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "training_args.bin").write_bytes(b"PK")
    assert "*.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    check_model(config(folder))


DUMMY = {"vllm_kwargs": {"load-format": "dummy"}}
ALONE, READ = {"mode": "actor"}, {"mode": "preprocessor", "streams_from": "x"}
POOL, KL = {"preprocessor_fraction": 1}, {"rl": {"kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, True),
        ({"vllm_config": DUMMY}, True),
        ({"debug": ALONE}, True),
        ({"debug": ALONE, "vllm_config": DUMMY}, False),
        ({"debug": READ}, False),
        ({"debug": READ, "world": POOL, "finetune": KL}, True),
        ({"debug": {"mode": "finetune", "streams_from": "x"}}, True),
    ],
)
def test_weights_are_needed_where_they_are_loaded(tmp_path: Path, settings: dict[str, Any], is_refused: bool) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    if is_refused:
        assert "*.safetensors" in refusal(folder, **settings)
    else:
        check_model(config(folder, **settings))


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS[:-1],
        WEIGHTS + b"x",
        WEIGHTS[:40],
        b"",
        (9).to_bytes(8, "little") + b"[1, 2, 3]",
        (9).to_bytes(8, "little") + b'{"w": [1}',
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
)
def test_weights_that_are_truncated(tmp_path: Path, content: bytes) -> None:
    folder = save_model_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(folder)


def test_an_index_names_files_that_are_missing(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path)
    names = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "model.safetensors").rename(folder / names["w1"])
    assert names["w2"] in refusal(folder)
    (folder / names["w2"]).write_bytes(WEIGHTS[:-4])
    message = refusal(folder)
    assert names["w2"] in message and f"{len(WEIGHTS) - 4} bytes" in message and str(len(WEIGHTS)) in message
    (folder / names["w2"]).write_bytes(WEIGHTS)
    check_model(config(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_settings_that_are_truncated(tmp_path: Path, name: str) -> None:
    folder = save_model_folder(tmp_path)
    (folder / name).write_text('{"a": ')
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize(
    ("heads", "shared", "fitting"), [(9, None, {1, 3, 9}), (12, 4, {1, 2, 4, 12}), (8, 1, {1, 2, 4, 8})]
)
def test_workers_of_a_server_share_the_heads_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, shared: int | None, fitting: set[int]
) -> None:
    write_config(tmp_path, text_config={"num_attention_heads": heads, "num_key_value_heads": shared})
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, _: str(tmp_path / "config.json"))
    for size in range(1, 17):
        run = with_options("somebody/model" if size % 2 else tmp_path, **{"tensor-parallel-size": size})
        with nullcontext() if size in fitting else pytest.raises(ConfigError) as caught:
            check_parallel_size(run)
        assert caught is None or (caught.value.key.endswith("tensor-parallel-size") and caught.value.got == size)


def test_nothing_is_refused_about_a_model_that_says_nothing(tmp_path: Path) -> None:
    run = with_options(tmp_path, tensor_parallel_size=2, max_model_len=10**6)
    for content in ("{}", "[]", "no json"):
        (tmp_path / "config.json").write_text(content)
        check_parallel_size(run)
        check_context(run, {})


CONTEXTS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "short": ({"max_position_embeddings": 1024}, 1025, True),
    "long enough": ({"max_position_embeddings": 1024}, 1024, False),
    "inside": ({"text_config": {"max_position_embeddings": 64}}, 65, True),
    "older name": ({"n_positions": 64}, 65, True),
    "plain rotation": ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}, 65, True),
    "scaled": ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4}}, 256, False),
    "scaled, old form": ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear"}}, 256, False),
    "a table that is not longer": (
        {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4}},
        65,
        True,
    ),
    "by layers": ({"max_position_embeddings": 64, "rope_parameters": {"full": {"rope_type": "yarn"}}}, 65, False),
    "a length of its own": ({"max_position_embeddings": 64, "model_max_length": 128}, 128, False),
}


@pytest.mark.parametrize(("model", "asked", "is_refused"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_longer_than_the_models(model: dict[str, Any], asked: int, is_refused: bool, tmp_path: Path) -> None:
    run = with_options(write_config(tmp_path, **model), max_model_len=asked)
    with pytest.raises(ConfigError) if is_refused else nullcontext() as caught:
        check_context(run, {})
    assert caught is None or caught.value.key == "vllm_config.vllm_kwargs.max_model_len"
    check_context(run, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    check_context(with_options(tmp_path, max_model_len=asked, hf_overrides="{}"), {})


def with_adapter(model_path: object, sync: str = "adapter", rank: int = 16, **options: Any) -> RunConfig:
    lora = {"lora": {"enabled": True, "sync": sync, "r": rank}}
    return config(model_path, finetune=lora, vllm_config={"vllm_kwargs": options})


@pytest.mark.parametrize(
    ("model", "options", "has_gpus", "key"),
    [
        ({"num_experts": 1}, {}, True, None),
        ({}, {"dtype": "float32"}, False, None),
        ({}, {"dtype": "float32"}, True, "vllm_config.vllm_kwargs.dtype"),
        ({}, {"max_lora_rank": 8}, True, "vllm_config.vllm_kwargs.max-lora-rank"),
        ({}, {"fully-sharded-loras": ""}, True, None),
        ({"num_experts": 8}, {}, True, "finetune.lora.sync"),
        ({"text_config": {"n_routed_experts": 64}}, {}, True, "finetune.lora.sync"),
        ({"quantization_config": {"bits": 4}}, {}, True, "finetune.lora.sync"),
        ({}, {"rank": 512}, True, None),
        ({}, {"rank": 513}, True, "finetune.lora.r"),
    ],
)
def test_an_adapter_that_could_not_be_served_exactly(
    tmp_path: Path, model: dict[str, Any], options: dict[str, Any], has_gpus: bool, key: str | None
) -> None:
    write_config(tmp_path, **model)
    check_adapter(with_adapter(tmp_path, sync="merged", **options), has_gpus)
    with pytest.raises(ConfigError) if key else nullcontext() as caught:
        check_adapter(with_adapter(tmp_path, **options), has_gpus)
    assert (caught and caught.value.key) == key


@pytest.mark.parametrize("answer", ["has it", "gone", "offline"])
def test_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Nothing but `config.json` is fetched, and nothing at all offline or in a dry run."""
    asked: list[str] = []

    def metadata(url: str, timeout: float) -> None:
        asked.append(url)
        if answer == "gone":
            raise OSError("404 Client Error\nmore")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", metadata)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, etag_timeout: asked.append(file))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", answer == "offline")
    run = config("somebody/model")
    assert len(check_model(run, may_ask_hub=False)) == 1 and asked == []
    if answer == "has it":
        assert check_model(run) == []
        assert asked[0].endswith("/somebody/model/resolve/main/config.json") and asked[1:] == ["config.json"]
    else:
        reason = refusal("somebody/model")  # type: ignore[arg-type]
        assert ("404 Client Error" if answer == "gone" else "HF_HUB_OFFLINE") in reason
        assert len(asked) == (answer == "gone")
