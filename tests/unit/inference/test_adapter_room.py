"""Servers that hold the frozen model: their options, and which layers may have an adapter."""

import pytest

from pipelinerl.config.finetune import LARGEST_ADAPTER_RANK, LoraConfig
from pipelinerl.errors import ConfigError
from pipelinerl.inference import main as llm
from pipelinerl.inference.arguments import (
    ADAPTER_VARIABLE,
    ROOM_RANKS,
    AdapterRoom,
    ServerSettings,
    check_adapter_options,
    layers_of,
    server_arguments,
    serves_adapter,
)
from pipelinerl.inference.main import adapter_room
from pipelinerl.inference.server import prepare_environment


def settings(adapter=None, **kwargs):
    return ServerSettings("model", "127.0.0.1", 1, "gloo", vllm_kwargs=kwargs, adapter=adapter)


def words_after(argv, option):
    rest = argv[argv.index(option) + 1 :]
    return rest[: next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (2, "8"), (16, "16"), (17, "32"), (512, "512")])
def test_the_room_is_the_next_size_that_vllm_has(rank, room):
    argv, _ = server_arguments(settings(AdapterRoom(rank, ("q_proj", "v_proj"))))
    assert words_after(argv, "--max-lora-rank") == [room]
    assert words_after(argv, "--max-loras") == ["1"]
    assert words_after(argv, "--lora-target-modules") == ["q_proj", "v_proj"]
    assert "--enable-lora" in argv


def test_a_rank_without_room_is_refused_by_the_rules():
    assert ROOM_RANKS[-1] == LARGEST_ADAPTER_RANK


@pytest.mark.parametrize("rank", [0, -4, 513])
def test_a_rank_without_room_is_refused_by_a_server_of_its_own(rank, capsys):
    with pytest.raises(ConfigError, match=f"got {rank}, expected 1 to 512"):
        server_arguments(settings(AdapterRoom(rank, ("q_proj",))))
    assert llm.main(["--model", "model", "--port", "1", "--adapter-rank", str(rank)]) == 2
    assert capsys.readouterr().err.startswith("error: rank of the adapter")


def test_servers_of_merged_weights_have_none():
    argv, _ = server_arguments(settings())
    assert not any("lora" in word for word in argv)
    # A variable that was left in the shell does not make a server of another kind.
    environ = {ADAPTER_VARIABLE: "1"}
    prepare_environment(environ, settings(), 1.0)
    assert not serves_adapter(environ)
    prepare_environment(environ, settings(AdapterRoom(4)), 1.0)
    assert serves_adapter(environ)


@pytest.mark.parametrize("option", ["enable-lora", "no-enable-lora", "max-loras", "lora-modules", "lora-dtype"])
def test_options_about_other_adapters_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option}.*finetune.lora.sync=merged"):
        check_adapter_options({option: True})
    with pytest.raises(ConfigError, match=option):
        server_arguments(settings(AdapterRoom(4), **{option: True}))


def test_options_that_leave_the_adapter_alone_are_free():
    check_adapter_options({"fully-sharded-loras": "", "max-model-len": 9, "exploration": 1})


def test_layers_are_the_matrices_without_the_embeddings():
    tensors = {
        "model.embed_tokens.weight": (200, 64),
        # vLLM does not start with a target that it cannot wrap (OPT).
        "model.decoder.embed_positions.weight": (130, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.mlp.up_proj.weight": (128, 64),
        "model.layers.1.mlp.up_proj.weight": (128, 64),
        "lm_head.weight": (200, 64),
    }
    assert layers_of(tensors) == ("q_proj", "up_proj")


def test_the_room_follows_from_the_configuration():
    assert adapter_room(LoraConfig(enabled=True)) is None
    assert adapter_room(LoraConfig(sync="adapter")) is None
    lora = LoraConfig(enabled=True, sync="adapter", r=4, target_modules=["self_attn.q_proj", "up_proj"])
    assert adapter_room(lora) == AdapterRoom(4, ("q_proj", "up_proj"))
