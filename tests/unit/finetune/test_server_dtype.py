"""The servers' dtype is known before they answer, as vLLM finds it itself."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from fakes.static_pool import StaticPool

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.served_weights import checkpoint_dtype, wire_dtype
from pipelinerl.finetune.weight_sync import WeightSync
from pipelinerl.inference.arguments import automatic_dtype, named_dtype

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("server", "computed", "sent"),
    [
        ("float16", FP32, FP16),
        ("half", FP32, FP16),
        ("bfloat16", FP32, BF16),
        ("float32", FP32, FP32),
        ("float", FP32, FP32),
        ("float16", BF16, BF16),
        ("float32", BF16, BF16),
        (None, FP32, FP32),
        ("auto", BF16, BF16),
        (None, BF16, BF16),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "--dtype"])
def test_weights_travel_in_the_coarser_dtype_of_trainer_and_server(key, server, computed, sent):
    config = RunConfig(output_dir="x", model_path="y", vllm_config={"vllm_kwargs": {key: server} if server else {}})
    assert wire_dtype(config, computed, CPU) == sent


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({}, None),
        ({"dtype": "auto"}, None),
        ({"dtype": None}, None),
        ({"dtype": "Half"}, "float16"),
        ({"dtype": ""}, None),
    ],
)
def test_without_a_name_vllm_decides(kwargs, named):
    assert named_dtype(kwargs) == named
    # Servers on a CPU have a default.
    assert named_dtype(kwargs, "float32") == (named if kwargs else "float32")


@pytest.mark.parametrize(
    ("checkpoint", "model_type", "has_bf16", "served"),
    [
        (BF16, "qwen2", True, BF16),
        (FP16, "qwen2", True, FP16),
        # vLLM never serves fp32 by itself.
        (FP32, "qwen2", True, BF16),
        (FP16, "gemma2", True, BF16),
        (BF16, "qwen2", False, FP16),
        (FP32, "qwen2", False, FP16),
        (BF16, "gemma2", False, FP32),
    ],
)
def test_auto_goes_by_the_checkpoint(checkpoint, model_type, has_bf16, served):
    assert automatic_dtype(name_of(checkpoint), model_type, has_bf16) == name_of(served)


@pytest.mark.slow
def test_vllm_finds_the_same():
    from vllm.config import model as vllm_model
    from vllm.platforms import current_platform

    assert BF16 in current_platform.supported_dtypes
    for model_type in ("qwen2", *vllm_model._FLOAT16_NOT_SUPPORTED_MODELS):
        for checkpoint in (FP32, FP16, BF16, torch.float64):
            theirs = vllm_model._resolve_auto_dtype(model_type, checkpoint, is_pooling_model=False)
            assert automatic_dtype(name_of(checkpoint), model_type) == name_of(theirs), (model_type, checkpoint)


def config_of(text=None, **parts):
    text = SimpleNamespace(dtype=text)
    return SimpleNamespace(get_text_config=lambda: text, **{"dtype": None, **parts})


def test_the_dtype_of_a_checkpoint_is_the_stated_one():
    assert checkpoint_dtype(config_of(dtype=BF16, text=FP16)) == "bfloat16"
    assert checkpoint_dtype(config_of(text="float16")) == "float16"
    assert checkpoint_dtype(config_of()) == "float32"


@pytest.mark.parametrize(("saved", "served"), [(FP16, FP16), (BF16, BF16), (FP32, BF16), (None, BF16)])
def test_a_trainer_in_fp32_beside_auto_servers_computes_with_what_they_hold(kit, tmp_path, saved, served):
    folder = tmp_path / "model"
    kit.model().to(saved or BF16).save_pretrained(folder)
    if saved is None:
        file = folder / "config.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in content.items() if key != "dtype"}))
    kit.tokenizer(folder)
    config = RunConfig(
        output_dir=str(tmp_path),
        model_path=str(folder),
        vllm_config={"vllm_kwargs": {"dtype": "auto"}},
        finetune={"dtype": "fp32", "gradient_checkpointing": False},
    )
    policy = load_policy(config, CPU)
    assert policy.served_dtype == served
    PlainBackend(policy, config.finetune, Ranks())
    assert all(torch.equal(p, p.to(served).float()) for p in policy.language_model.parameters())


@pytest.mark.parametrize(
    ("computed", "served", "told", "warned"),
    [(FP32, FP32, "bfloat16", True), (FP32, BF16, "bfloat16", False), (BF16, BF16, "float16", False)],
)
def test_a_server_in_another_dtype_is_said_once(kit, caplog, computed, served, told, warned):
    class Publisher(kit.publisher):
        def probe(self, sequences, name):
            return dataclasses.replace(super().probe(sequences, name), server_dtype=told)

    backend = PlainBackend(kit.policy(compute_dtype=computed, served_dtype=served), kit.config(), Ranks())
    feed = WeightSync(backend, Ranks(), StaticPool(Publisher()))
    for version in range(2):
        feed.send(version, [[1, 2, 3, 4]])
    lines = [line for line in caplog.messages if "actor_llm_0 holds its weights in" in line]
    assert len(lines) == int(warned)
    assert all("vllm_config.vllm_kwargs.dtype=bfloat16" in line for line in lines)
